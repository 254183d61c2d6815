"""What a completion request may hold: everything else is refused in one line, and quickly."""

import json

import pytest

from engine.errors import RequestError
from engine.server.schema import load_json, parse_completion
from engine.tokenizer import BOS


def test_a_request_with_nothing_but_a_prompt():
    asked = parse_completion({"prompt": "ab"})
    assert (asked.token_ids, asked.max_tokens, asked.stream) == ([BOS, 97, 98], 16, False)
    assert asked.kv_transfer_params is None


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("", [BOS]), ("é", [BOS, 0xC3, 0xA9]), ([0, 257], [0, 257]), ("\0", [BOS, 0])]
)
def test_prompts_that_are_served(prompt, tokens):
    assert parse_completion({"prompt": prompt}).token_ids == tokens


@pytest.mark.parametrize("value", [True, False, None])
def test_what_a_request_asks_of_its_checksums(value):
    assert parse_completion({"prompt": "a"}).kv_checksum is None
    assert parse_completion({"prompt": "a", "kv_checksum": value}).kv_checksum is value


def test_fields_that_are_not_known_are_ignored():
    assert parse_completion({"prompt": "a", "top_p": 1, "stop": None, "x": {"y": [1]}}).token_ids == [BOS, 97]


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("prompt", None, "prompt: use a string"),
        ("prompt", {}, "prompt: use a string"),
        ("prompt", 5, "prompt: use a string"),
        ("prompt", [], "prompt: use one token id"),
        ("prompt", ["a"], "prompt: token ids are"),
        ("prompt", [[1]], "prompt: token ids are"),
        ("prompt", [True], "prompt: token ids are"),
        ("prompt", [1.0], "prompt: token ids are"),
        ("prompt", [-1], "prompt: token ids are"),
        ("prompt", [258], "prompt: token ids are"),
        ("prompt", [2**64], "prompt: token ids are"),
        ("prompt", "x" * 8193, "prompt: longer than 8192 tokens"),
        ("prompt", [[]] * 1_000_000, "prompt: longer than 8192 tokens"),
        ("model", 5, "model: "),
        ("model", "m" * 257, "model: "),
        ("max_tokens", 0, "max_tokens: "),
        ("max_tokens", -1, "max_tokens: "),
        ("max_tokens", 2**70, "max_tokens: "),
        ("max_tokens", True, "max_tokens: "),
        ("max_tokens", "5", "max_tokens: "),
        ("max_tokens", 1.5, "max_tokens: "),
        ("max_tokens", None, "max_tokens: "),
        ("temperature", 0.7, "temperature: only 0 is served"),
        ("temperature", -1, "temperature: only 0 is served"),
        ("temperature", False, "temperature: only 0 is served"),
        ("temperature", "0", "temperature: only 0 is served"),
        ("temperature", None, "temperature: only 0 is served"),
        ("n", 2, "n: "),
        ("n", True, "n: "),
        ("kv_checksum", "false", "kv_checksum: "),
        ("kv_checksum", 0, "kv_checksum: "),
        ("kv_checksum", [], "kv_checksum: "),
        ("stream", "yes", "stream: "),
        ("stream", 1, "stream: "),
        ("kv_transfer_params", [], "kv_transfer_params: "),
        ("kv_transfer_params", "x", "kv_transfer_params: "),
        ("kv_transfer_params", 1, "kv_transfer_params: "),
    ],
)
def test_a_wrong_field_is_named(field, value, what):
    with pytest.raises(RequestError) as refused:
        parse_completion({"prompt": "a"} | {field: value})
    assert str(refused.value).startswith(what)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_request_without_a_prompt():
    with pytest.raises(RequestError, match="prompt"):
        parse_completion({})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b'{"prompt": "a"} trailing',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "x": "\\udfff"}',
        b'{"\\ud800": 1}',
        b'{"prompt": "a", "x": NaN}',
        b'{"prompt": "a", "kv_transfer_params": {"a": Infinity}}',
        b'{"prompt": "a", "x": -Infinity}',
        b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"x":' * 100_000,
        b'{"prompt": "a", "x": ' + b"[" * 1000 + b"]" * 1000 + b"}",
        b"\xef\xbb\xbf{}",
        json.dumps({"prompt": "a"}).encode("utf-16"),
        b"\0" * 1000,
    ],
)
def test_bodies_that_are_no_json_object(raw):
    with pytest.raises(RequestError, match=r"^body: "):
        load_json(raw)
