"""docs/faults.md: every fault kind, from its docstrings, its parameter model and the scenarios that use it."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from faults.base import Fault
from faults.moments import MOMENTS
from faults.registry import FAULTS
from harness.docgen.markdown import code, generated, table
from scenarios.json_schema import Schema, fault_summary, own_kinds, scenario_schema
from scenarios.loader import SUFFIXES, load_scenario
from scenarios.schema import Scenario

INTRO = """\
What can go wrong, one kind a file in [faults/](../faults). A scenario names kinds under `faults:`, each with the load
that it acts on and the moment at which it does:

```yaml
faults:
  - kind: early_reuse
    when: {load: 2, at: before_read}
```

`load` counts requests from 1. `at` is one of the kind's moments; a moment is reached at a seam
([structure.md](structure.md#seams)). What a kind *needs* are seams and levers that the target must provide, and
`kv_checksums`, which every policy but `off` provides; a cell that lacks one is `not_applicable`. A fault that cannot
show what it changed makes its cell `unknown`. `kvchaos list faults` prints a shorter list."""

_RECIPE = re.compile(r"\bS\d\d\b")
_RECIPE_ROW = re.compile(r"^\| (S\d\d) \| (.*?) \| (.*) \|$", re.MULTILINE)
_REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+")


def faults_page(root: Path) -> str:
    """The page, from the registry and from docs/incidents.md and scenarios/ below `root`."""
    recipes = {
        match.group(1): f"{match.group(2)}: {match.group(3)}"
        for match in _RECIPE_ROW.finditer((root / "docs" / "incidents.md").read_text(encoding="utf-8"))
    }
    files = sorted(path for path in (root / "scenarios").rglob("*") if path.suffix in SUFFIXES)
    scenarios = [(path, load_scenario(path)) for path in files]
    kinds, defs = own_kinds(), scenario_schema()["$defs"]
    lines = ["# Faults", "", generated("faults/", "docs"), "", *INTRO.splitlines(), ""]
    rows = [
        [f"[{kind}](#{kind})", fault_summary(kind), ", ".join(map(code, _at(kind, defs)))] for kind in sorted(FAULTS)
    ]
    lines += table(("kind", "what goes wrong", "moments"), rows)
    for kind in kinds:
        users = [(path, scenario) for path, scenario in scenarios if kind in {f.kind for f in scenario.faults}]
        lines += ["", *_section(kind, defs, recipes, users, root)]
    return "\n".join(lines) + "\n"


def _section(
    kind: str,
    defs: Mapping[str, Schema],
    recipes: Mapping[str, str],
    users: Sequence[tuple[Path, Scenario]],
    root: Path,
) -> Iterator[str]:
    fault = FAULTS[kind]
    texts = [inspect.getdoc(sys.modules[fault.__module__]) or "", fault.__doc__ or ""]
    yield f"## {kind}"
    yield ""
    summary = fault_summary(kind)
    acts = _first_paragraph(fault.__doc__ or "")
    yield summary if acts in summary else f"{summary} {acts}"
    yield ""
    yield from _moments(kind, defs)
    yield from _parameters(kind, defs)
    named = sorted({recipe for text in texts for recipe in _RECIPE.findall(text)})
    reports = {report for text in texts for report in _REPORT.findall(text)}
    reports |= {report for _, scenario in users for report in scenario.incidents}
    if named or reports:
        yield "From [incidents.md](incidents.md):"
        yield ""
        yield from (f"- {recipe}: {recipes.get(recipe, 'not in incidents.md')}" for recipe in named)
        if reports:
            yield f"- {', '.join(sorted(reports, key=str.lower))}"
        yield ""
    yield from _used_by(users, root)


def _moments(kind: str, defs: Mapping[str, Schema]) -> Iterator[str]:
    at = _when(kind, defs)["at"]
    if "description" in at:
        yield f"When: {at['description']}"
        yield ""
    rows = []
    for moment in _at(kind, defs):
        default = " (default)" if at.get("default") == moment else ""
        needs = _needs(FAULTS[kind], moment)
        rows.append([code(moment) + default, code(MOMENTS.get(moment, "-")), needs])
    yield from table(("`at`", "reached at", "needs"), rows)
    yield ""


def _parameters(kind: str, defs: Mapping[str, Schema]) -> Iterator[str]:
    params = _params(kind, defs)
    rows = [
        [
            code(name),
            _values(field, defs),
            _default(field, required=name in params["required"]),
            field.get("description", ""),
        ]
        for name, field in params["properties"].items()
        if name not in ("kind", "when")
    ]
    rows += [
        [code(f"when.{name}"), _values(field, defs), _default(field, required=False), field.get("description", "")]
        for name, field in _when(kind, defs).items()
        if name not in ("load", "at")
    ]
    yield from [*table(("parameter", "values", "default", "meaning"), rows)] or ["No parameters."]
    yield ""


def _used_by(users: Sequence[tuple[Path, Scenario]], root: Path) -> Iterator[str]:
    if not users:
        yield "No scenario uses it."
        return
    yield "Used by:"
    yield ""
    for path, scenario in sorted(users, key=lambda user: user[1].name):
        yield f"- [{scenario.name}](../{path.relative_to(root).as_posix()}): {scenario.summary}"


def _needs(fault: type[Fault[Any]], moment: str) -> str:
    """What it needs at a moment, with every parameter at its default."""
    when: Any = fault.params_model.model_fields["when"].annotation
    params = fault.params_model.model_construct(kind=fault.kind, when=when.model_construct(load=1, at=moment))
    try:
        return ", ".join(code(name) for name in sorted(fault.needs(params)))
    except (AttributeError, KeyError, TypeError):  # it asks for a parameter that has no default
        return "depends on its parameters"


def _params(kind: str, defs: Mapping[str, Schema]) -> Schema:
    return next(schema for schema in defs.values() if schema.get("title") == kind)


def _when(kind: str, defs: Mapping[str, Schema]) -> dict[str, Schema]:
    reference: str = _params(kind, defs)["properties"]["when"]["$ref"]
    fields: dict[str, Schema] = defs[reference.rpartition("/")[2]]["properties"]
    return fields


def _at(kind: str, defs: Mapping[str, Schema]) -> list[str]:
    at = _when(kind, defs)["at"]
    moments: list[str] = at["enum"] if "enum" in at else [at["const"]]
    return moments


def _values(field: Schema, defs: Mapping[str, Schema]) -> str:
    """What a field may hold, in words."""
    if "$ref" in field:
        return _values(defs[field["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in field or "oneOf" in field:
        every = [*field.get("anyOf", []), *field.get("oneOf", [])]
        branches = [branch for branch in every if branch.get("type") != "null"]
        return " or ".join(dict.fromkeys(_values(branch, defs) for branch in branches))
    if "const" in field:
        return code(field["const"])
    if "enum" in field:
        return ", ".join(map(code, field["enum"]))
    kind = field.get("type")
    if kind == "array":
        return _list(field, defs)
    words = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
    return words.get(str(kind), "mapping") + _bounds(field)


def _list(field: Schema, defs: Mapping[str, Schema]) -> str:
    if "prefixItems" in field:
        return f"[{', '.join(_values(item, defs) for item in field['prefixItems'])}]"
    items = field.get("items")
    return f"list of {_values(items, defs)}" if isinstance(items, dict) else "list"


def _bounds(field: Schema) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if low is not None and high is not None:
        return f", {low} to {high}"
    if low is not None:
        return f", at least {low}"
    return f", at most {high}" if high is not None else ""


def _default(field: Schema, required: bool) -> str:
    if required:
        return "required"
    default = field.get("default")
    return "none" if default is None else code(default if isinstance(default, str) else json.dumps(default))


def _first_paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
