"""The documents' commands work, and print what the documents say that they print.

In README.md and docs/*.md every line of a ```sh block that begins with kvchaos or pytest is run, in the order of the
page and in a folder of its own. Three conventions:

- a comment `# exits 64` after a command is its exit code; without it, 0
- a ```text block after a ```sh block is part of what its commands print (blanks do not count)
- `<!-- file: PATH -->` before a block writes the block to that file

```sh norun: its commands are not run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.cli import main

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
ALWAYS = "scenarios/smoke/clean-transfer.yaml"


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    exit_code: int


@dataclass(frozen=True)
class Step:
    """Files to write, commands to run, and what they must print."""

    files: tuple[tuple[str, str], ...]
    commands: tuple[Command, ...]
    output: tuple[str, ...]


def commands_of(body: str) -> tuple[Command, ...]:
    found = []
    for line in body.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        program = Path(words[0]).name if words else ""
        if program in ("kvchaos", "pytest"):
            code = re.search(r"# exits (\d+)\s*$", line)
            found.append(Command((program, *words[1:]), int(code[1]) if code else 0))
    return tuple(found)


def steps_of(text: str) -> list[Step]:
    steps: list[Step] = []
    files: list[tuple[str, str]] = []
    for block in FENCE.finditer(text):
        if block["file"]:
            files.append((block["file"], block["body"]))
        elif block["language"] == "sh" and block["options"].strip() != "norun":
            steps.append(Step(tuple(files), commands_of(block["body"]), ()))
            files = []
        elif block["language"] == "text" and steps and not files:
            last = steps[-1]
            steps[-1] = Step(last.files, last.commands, (*last.output, *block["body"].splitlines()))
    return [step for step in steps if step.commands]


def pages() -> list[Path]:
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if steps_of(path.read_text())]


def prepare(folder: Path, steps: list[Step]) -> None:
    """A small copy of the repository: what the commands name, and of scenarios/smoke little more, so as to be quick."""
    named = {word for step in steps for command in step.commands for word in command.words}
    for name in sorted({ALWAYS, *named}):
        if (ROOT / name).is_file() and not Path(name).is_absolute():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_kvchaos(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """In this process: importing torch anew takes longer than most commands."""
    monkeypatch.setattr(sys, "argv", list(words))
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code


def run_pytest(words: tuple[str, ...]) -> tuple[int, str]:
    """In a process of its own, as a person would; without what makes the pytest around it a special one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words[1:]]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_commands_of_a_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = steps_of(page.read_text())
    prepare(tmp_path, steps)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    for step in steps:
        for name, text in step.files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        printed = ""
        for command in step.commands:
            if command.words[0] == "pytest":
                code, output = run_pytest(command.words)
            else:
                code = run_kvchaos(command.words, monkeypatch)
                output = "".join(capsys.readouterr())
            printed += output
            assert code == command.exit_code, f"{shlex.join(command.words)} exits {code}:\n{output}"
        squeezed = " ".join(printed.split())
        for line in step.output:
            assert " ".join(line.split()) in squeezed, (
                f"{page.name} shows a line that is not printed: {line}\n{printed}"
            )


def test_the_pages_that_a_reader_begins_with_have_commands() -> None:
    assert {"README.md", "writing-scenarios.md"} <= {page.name for page in pages()}


def test_what_is_taken_from_a_page() -> None:
    text = """
<!-- file: scenarios/mine/a.yaml -->
```yaml
name: a
```

```sh
make test
.venv/bin/kvchaos run 'a b' \\
    --seed 7  # exits 1
pytest scenarios
```

```text
FAILED
```

```sh norun
kvchaos run everything
```
"""
    commands = (Command(("kvchaos", "run", "a b", "--seed", "7"), 1), Command(("pytest", "scenarios"), 0))
    assert steps_of(text) == [Step((("scenarios/mine/a.yaml", "name: a\n"),), commands, ("FAILED",))]
