from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from harness.commands.output import printing
from harness.errors import OutputError


class Stuck(io.StringIO):
    """A stream that takes nothing."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("through", ["rich", "click"])
def test_a_reader_who_has_left_is_no_error(monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    monkeypatch.setattr(sys, "stdout", Stuck(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    after = []
    with printing() as console:
        console.print("x") if through == "rich" else click.echo("x")
        after.append("printed")
    assert after == [], "nothing more is made for nobody"


def test_a_full_disk_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Stuck(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with (
        pytest.raises(OutputError, match=r"^standard output: cannot be written \(No space left on device\)$"),
        printing(),
    ):
        click.echo("x")


def test_without_standard_output_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with printing() as console:
        console.print("x")
        click.echo("x")


def test_other_errors_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), printing():
        raise KeyError
    with printing() as console:
        console.print("[bold]x[/] :smile: 1")
    assert capsys.readouterr().out == "[bold]x[/] :smile: 1\n"


def test_a_run_whose_reader_has_left_ends_as_it_came_out(
    kvchaos: Callable[..., Any], write_scenario: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flip = {"kind": "bit_flip", "when": {"load": 2, "at": "before_verify"}, "layer": 40}
    path = write_scenario(faults=[flip])
    arguments: tuple[tuple[object, ...], ...] = (("run", path), ("run", path, "--json"), ("analyze", "runs/latest"))
    for given in arguments:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", Stuck(BrokenPipeError(errno.EPIPE, "Broken pipe")))
            assert kvchaos(*given).code == 2
    assert Path("runs/latest/results.json").exists()
