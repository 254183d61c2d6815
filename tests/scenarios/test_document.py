from __future__ import annotations

import pytest

from scenarios.document import MAX_DEPTH, MAX_NODES, MAX_TEXT, parse_document
from scenarios.problems import ScenarioError


def errors(text: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        parse_document(text, "f")
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("16", 16),
        ("-3", -3),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("GAP-8", "GAP-8"),
        ('"16"', "16"),
        ("'true'", "true"),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("vllm-project/vllm#52234", "vllm-project/vllm#52234"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    _, plain = parse_document(f"a: {text}\n", "f")
    assert plain == {"a": value}
    assert type(plain["a"]) is type(value)


def test_aliases_stand_for_the_anchored_value_and_keep_lines() -> None:
    root, plain = parse_document("a: &x {b: 1,\n  c: [2, 3]}\nd: *x\ne:\n  - *x\n", "f")
    assert plain == {"a": {"b": 1, "c": [2, 3]}, "d": {"b": 1, "c": [2, 3]}, "e": [{"b": 1, "c": [2, 3]}]}
    assert root.line_at(("d",)) == (3, 1)
    assert root.line_at(("d", "c", 1)) == (2, 3)
    assert root.line_at(("e", 0)) == (5, 2)


def test_the_line_of_a_value_is_its_keys_and_unwritten_parts_fall_back() -> None:
    root, _ = parse_document("# comment\n\na:\n  b:\n    - 1\n    - c: 2\n", "f")
    assert root.line_at(()) == (3, 0)
    assert root.line_at(("a", "b")) == (4, 2)
    assert root.line_at(("a", "b", 1, "c")) == (6, 4)
    assert root.line_at(("a", "b", 2)) == (4, 2)
    assert root.line_at(("a", "z", "c")) == (3, 1)
    assert root.line_at((0,)) == (3, 0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", ["f:1: file: the file is empty: write a scenario, beginning with schema_version: 1"]),
        ("# nothing\n", ["f:1: file: the file is empty: write a scenario, beginning with schema_version: 1"]),
        ("---\n...\n", ["f:1: file: the file is empty: write a scenario, beginning with schema_version: 1"]),
        ("a: 1\n---\nb: 2\n", ["f:2: file: a second document starts here: keep one scenario a file"]),
        (
            "a: 1\nb: 2\na: 3\nc: {d: 1,\n  d: 2}\n",
            [
                "f:3: a: given twice, first on line 1: keep one",
                "f:5: c.d: given twice, first on line 4: keep one",
            ],
        ),
        (
            "a:\n\tb: 1\n",
            [
                "f:2: file: not valid YAML: while scanning for the next token, found character '\\t' that cannot start "
                "any token: indent with spaces, not tabs"
            ],
        ),
        (
            "a: [1,\nb: 2\n",
            [
                "f:3: file: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"
                ": check indentation, quotes and brackets"
            ],
        ),
        ("a: \x07\n", ["f:1: file: the character 0x7 is not allowed in YAML: remove it"]),
        ("a: 1\nb: \ud800\n", ["f:2: file: the character 0xd800 is not allowed in YAML: remove it"]),
        ('a: 1\nb: "\\ud800"\n', ["f:2: b: half of a surrogate pair is not text: write the character itself"]),
        (
            'a: 1\nb: "\\UFFFFFFFF"\n',
            ["f:2: file: not valid YAML: an escape or a version is out of range"],
        ),
        (
            "a: .nan\nb: -.inf\n",
            [
                f"f:{n}: {k}: {v} is not a finite number: use one, or put it in quotes if it is text"
                for n, k, v in ((1, "a", ".nan"), (2, "b", "-.inf"))
            ],
        ),
        ("a: 1e999\n", ["f:1: a: 1e999 is too large: use a finite number"]),
        (
            "a: 9223372036854775808\n",
            ["f:1: a: 9223372036854775808 does not fit in 64 bits: use a smaller number"],
        ),
        ("a:\n  <<: {b: 1}\n", ["f:2: a: merge keys (<<) are not supported: write the keys out"]),
        ("1: a\n", ["f:1: file: a key is 1: keys are words, put it in quotes if it is one"]),
        (
            "true: a\n~: b\n",
            [
                f"f:{n}: file: a key is {k}: keys are words, put it in quotes if it is one"
                for n, k in ((1, "true"), (2, "empty"))
            ],
        ),
        ("a:\n  ? [b]\n  : 1\n", ["f:2: a: a key is a list, a mapping or an alias: write it as a word"]),
        ("a: &x b\n*x : 1\n", ["f:2: file: a key is a list, a mapping or an alias: write it as a word"]),
        ("a: *x\n", ["f:1: a: *x has no anchor that ends before it: add &name"]),
        ("a: &x\n  - *x\n", ["f:2: a[0]: *x has no anchor that ends before it: add &name"]),
        (
            "a: !!python/name:os.system x\n",
            ["f:1: a: the tag tag:yaml.org,2002:python/name:os.system is not supported: remove it"],
        ),
        ("a: !!int '1'\n", ["f:1: a: the tag tag:yaml.org,2002:int is not supported: remove it"]),
    ],
)
def test_what_is_refused(text: str, wanted: list[str]) -> None:
    assert errors(text) == wanted


def test_alias_bombs_are_refused_before_they_expand() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
    (error,) = errors(text)
    assert f"aliases expand to more than {MAX_NODES} values" in error


def test_aliases_cannot_nest_without_a_limit() -> None:
    text = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2000))
    assert errors(text) == [f"f:1: a{MAX_DEPTH - 1}[0]: aliases nest more than {MAX_DEPTH} deep: use fewer"]


def test_aliases_cannot_multiply_text() -> None:
    (error,) = errors(f"a: &a {'x' * 2000}\nb: [{', '.join(['*a'] * 2000)}]\n")
    assert error.startswith("f:2: b[")
    assert f"more than {MAX_TEXT} characters" in error


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused(opening: str) -> None:
    (error,) = errors(opening * 20_000)
    assert error.startswith("f:1: ")


def test_too_many_values_are_refused() -> None:
    assert errors("a: [" + "1, " * MAX_NODES + "1]") == [
        f"f:1: a[{MAX_NODES - 3}]: more than {MAX_NODES} values: split the scenario"
    ]
