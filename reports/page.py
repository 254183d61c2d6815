"""What every page that kvchaos writes has in common: templates that escape, style and script written into the page, and
the digests by which the page's policy allows these and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reports.text import visible

# By file, not by package name: a folder called reports beside somebody's script must not get in the way.
_TEMPLATES = Path(__file__).parent / "templates"


def environment() -> Environment:
    """Jinja for the templates: an unknown name is an error, and every text is escaped and on one line."""
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )


def inlined(styles: Sequence[str], script: str | None = None) -> dict[str, Any]:
    """These templates as they stand in the page, and the digests by which its policy knows them."""
    texts = {"style": "".join(map(_text, styles))}
    if script is not None:
        texts["script"] = _text(script)
    return _with_digests(texts)


def _with_digests(texts: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: Markup(text) for name, text in texts.items()}
    return found | {f"{name}_digest": _csp_digest(text) for name, text in texts.items()}


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _csp_digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


def _shown(value: object) -> object:
    """What every expression of a template goes through on its way to the page, before it is escaped."""
    return visible(str(value)) if isinstance(value, str) and not isinstance(value, Markup) else value
