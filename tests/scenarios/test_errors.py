"""What a person reads when a scenario is wrong, to the character. Single mistakes are in `mistakes.txt`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scenarios.loader import parse_scenario
from scenarios.problems import ScenarioError


def mistakes() -> Iterator[tuple[str, str, str]]:
    """What is replaced, by what, and the line that must come out."""
    blocks = Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8").split("\n\n")
    for block in blocks:
        parts = {sign: [line[2:] for line in block.splitlines() if line.startswith(f"{sign} ")] for sign in "-+!"}
        if parts["!"]:
            yield "\n".join(parts["-"]), "\n".join(parts["+"]), f"f.yaml:{parts['!'][0]}"


def test_the_table_is_read_whole() -> None:
    text = Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8")
    assert len(list(mistakes())) == text.count("\n! ") > 50


def errors(text: str) -> list[str]:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(text, "f.yaml")
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("old", "new", "wanted"), list(mistakes()))
def test_one_mistake_gives_one_line(sound: str, old: str, new: str, wanted: str) -> None:
    damaged = sound.replace(old, new, 1)
    assert damaged != sound
    assert errors(damaged) == [wanted]


def test_all_mistakes_of_a_file_are_reported_in_its_order(sound: str) -> None:
    damaged = (
        sound.replace("stale-read", "stale_read")
        .replace("block_size: 16, layout: NHD", "num_blocks: 4")
        .replace("load: 2", "load: 9")
        .replace("transfer: pull", "transfer: pull\nknown_gap: {off: GAP-8}\nothers: {off: {verdict: verified}}")
        .replace("checksum: {version: 1}", "policies: [fail_open]")
        .replace("kind: early_reuse", "kind: other\n  - kind: early_reuse")
    )
    assert [line.split(": ")[:2] for line in errors(damaged)] == [
        ["f.yaml:2", "name"],
        ["f.yaml:7", "topology.consumer.num_blocks"],
        ["f.yaml:9", "known_gap.off"],
        ["f.yaml:10", "others.off"],
        ["f.yaml:14", "faults[0].kind"],
        ["f.yaml:16", "faults[1].when.load"],
        ["f.yaml:18", "expect.off"],
        ["f.yaml:20", "expect.fail_closed_fail"],
        ["f.yaml:21", "expect.fail_closed_recompute"],
    ]


def test_room_for_the_longest_request_points_to_what_is_written(sound: str) -> None:
    without = sound[: sound.index("topology:")] + sound[sound.index("checksum:") :]
    lines = errors(without.replace("[40, 200]", "1200"))
    assert [line.split(": ")[:2] for line in lines] == [
        ["f.yaml:6", f"topology.{side}.num_blocks"] for side in ("consumer", "producer")
    ]


def test_faults_of_an_empty_registry_are_refused(sound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faults.registry.PARAMS", {})
    assert errors(sound) == ["f.yaml:12: faults[0].kind: kind is 'early_reuse': there is none to use"]


@pytest.mark.parametrize(("text", "what"), [("[1, 2]", "[1, 2]"), ("scenario", "'scenario'"), ("5", "5")])
def test_the_top_level_must_be_a_mapping(text: str, what: str) -> None:
    assert errors(text) == [f"f.yaml:1: file: the top level is {what}: use a mapping (key: value)"]


def test_a_file_of_only_mistakes_is_not_listed_in_full() -> None:
    lines = errors("".join(f"k{n}: 1\n" for n in range(300)))
    assert len(lines) == 101
    assert "f.yaml:1: file: 204 more problems are not listed: fix these first" in lines


def test_errors_stay_on_one_line_and_short(sound: str) -> None:
    for value in ('"a\\nb\\u2028c\\e[31m"', '"' + "x" * 5000 + '"'):
        for damaged in (
            sound.replace("schema_version: 1", f"schema_version: 1\n{value}: 1"),
            sound.replace("pull", value),
        ):
            (line,) = errors(damaged)
            assert line.isprintable()
            assert len(line) < 400
