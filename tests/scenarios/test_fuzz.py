"""Whatever the text, a scenario or a ScenarioError comes out."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from scenarios.loader import parse_scenario
from scenarios.problems import ScenarioError
from scenarios.schema import Scenario

SOUND = Path(__file__).with_name("stale-read.yaml").read_text(encoding="utf-8")
FRAGMENTS = [
    *("&a ", "*a", "? ", "- ", ": ", "\n", "\t", "---\n", "...\n", "|\n", ">-\n", "<<: *a\n", "#", "%YAML 9.9\n"),
    *("{", "}", "[", "]", ",", "'", '"', "!", "!!int ", "!!python/object:a.b ", "@", "`", "\0", "\ufeff", "\r", "\x85"),
    *('"\\UFFFFFFFF"', '"\\ud800"', '"\\x"', "\u2028", "null", "true", ".nan", "-.inf", "1e999", "9" * 25, "9" * 5000),
    *("off", "early_reuse", "swap_tokens", "GAP-8", "when", "load", "-1", "0", "[1, 2]", "{a: 1}", "x" * 200),
]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A sound scenario with a few pieces cut out and others put in."""
    text = SOUND
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.sampled_from([0, 0, 1, 5, 40]))
        text = text[:start] + "".join(draw(st.lists(st.sampled_from(FRAGMENTS), max_size=3))) + text[end:]
    return text


def parsed(text: str) -> Scenario | ScenarioError:
    try:
        return parse_scenario(text, "f")
    except ScenarioError as error:
        return error


def check(text: str) -> None:
    result = parsed(text)
    if isinstance(result, Scenario):
        assert Scenario.from_plain(result.to_plain()) == result
        return
    lines = str(result).splitlines()
    assert len(lines) == len(result.problems) > 0
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    last = 2 + sum(text.count(end) for end in "\n\r\x85\u2028\u2029")
    assert all(1 <= problem.line <= last for problem in result.problems)


@given(damaged())
@example("\ud7fc:")  # a code point that is no character
@example(SOUND)
def test_damaged_scenarios(text: str) -> None:
    check(text)


@given(st.text())
@example("[" * 5000)
@example("{" * 5000)
@example("%YAML 1." + "9" * 5000 + "\n---\n")
def test_any_text(text: str) -> None:
    check(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*Scenario.model_fields]), JSON_VALUES), JSON_VALUES)
def test_any_plain_values(parts: dict[str, object], fault: object) -> None:
    plain = {**parse_scenario(SOUND).to_plain(), **parts}
    for data in (plain, {**plain, "faults": [fault]}, fault):
        try:
            scenario = Scenario.from_plain(data)
        except ScenarioError:
            continue
        assert Scenario.from_plain(scenario.to_plain()) == scenario
