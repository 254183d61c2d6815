"""Standard output: a reader who leaves early (`| head`) is no error, and never changes what a command concludes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

from harness.errors import OutputError


class _Console(Console):
    """Rich ends the whole program, with exit code 1, when the reader of a pipe has left."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def printing() -> Iterator[Console]:
    """A console for plain text: nothing in it is markup. What nobody reads any more is dropped.

    Raises:
        OutputError: standard output cannot be written for another reason.
    """
    try:
        yield _Console(markup=False, emoji=False, highlight=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        _discard_stdout()
        raise OutputError(f"standard output: cannot be written ({error.strerror})") from None


def _discard_stdout() -> None:
    """What is still in the buffer would raise again when the interpreter exits."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
