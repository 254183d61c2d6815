"""Writing a report so that a reader sees the old file or the new one, never half of one.

A run may be stopped at any moment, and a CI job may pick the files up while it is.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from reports.errors import ReportError


def write_atomically(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to a temporary file beside `path`, then put it in place in one step.

    The temporary file is opened in the ordinary way, so that the report gets the permissions that the user's umask
    gives (`tempfile` would make it unreadable for everybody else).

    Raises:
        ReportError: the file cannot be written. What was at `path` before is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ReportError(f"{path}: cannot be written ({reason}): check that the folder exists and has room") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
