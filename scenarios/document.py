"""YAML text to plain values that remember their lines. Safe by construction: nothing but these types comes out.

PyYAML's own constructor is not used: it forgets lines, keeps the last of two equal keys, and lets aliases multiply
without a limit. Its events are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import yaml

from scenarios.problems import Loc, Problem, ScenarioError, clipped, field_name, shown
from scenarios.scalars import Scalar, resolve

MAX_NODES = 10_000
MAX_DEPTH = 32
MAX_TEXT = 1 << 20
"""Characters of all scalars together, aliases expanded."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value and the line to name for it: that of its key in a mapping, else its own."""

    line: int
    value: Scalar | list[Node] | dict[str, Node]

    def line_at(self, loc: Loc) -> tuple[int, int]:
        """The line of the deepest written part of a location, and how many of its parts are written."""
        node = self
        for depth, part in enumerate(loc):
            children = node.value
            if isinstance(children, dict) and part in children:
                node = children[str(part)]
            elif isinstance(children, list) and isinstance(part, int) and part < len(children):
                node = children[part]
            else:
                return node.line, depth
        return node.line, len(loc)


class _StopError(Exception):
    """Reading on makes no sense: the text is not YAML, or is more than a scenario can be."""

    def __init__(self, line: int, loc: Loc, message: str) -> None:
        super().__init__(message)
        self.line, self.loc, self.message = line, loc, message


def parse_document(text: str, file: str) -> tuple[Node, Any]:
    """Parse one YAML document.

    Returns:
        the tree with its lines, and the same as plain values (dict, list, str, int, float, bool, None) in which
        aliases are expanded.

    Raises:
        ScenarioError: with everything in the text that is not usable.
    """
    builder = _Builder(text, file)
    try:
        root = builder.document()
        plain = _Expansion().plain(root, ())
    except _StopError as stop:
        builder.report(stop.line, stop.loc, stop.message)
    if builder.problems:
        raise ScenarioError(builder.problems)
    return root, plain


class _Builder:
    """Builds the tree from PyYAML's events. Collects problems as long as reading on makes sense."""

    def __init__(self, text: str, file: str) -> None:
        self.problems: list[Problem] = []
        self._file = file
        self._events = _events(text)
        self._anchors: dict[str, Node] = {}
        self._nodes = 0

    def report(self, line: int, loc: Loc, message: str) -> None:
        self.problems.append(Problem(self._file, line, field_name(loc), message))

    def document(self) -> Node:
        root: Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise _StopError(_line(event), (), "a second document starts here: keep one scenario a file")
            if isinstance(event, yaml.NodeEvent):
                root = self._node(event, ())
        if root is None or root.value is None:
            raise _StopError(1, (), "the file is empty: write a scenario, beginning with schema_version: 1")
        return root

    def _node(self, event: Any, loc: Loc) -> Node:
        line = _line(event)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _StopError(line, loc, f"more than {MAX_NODES} values: split the scenario")
        if len(loc) > MAX_DEPTH:
            raise _StopError(line, loc[:2], f"nested more than {MAX_DEPTH} deep: a scenario is flatter than that")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise _StopError(
                    line, loc, f"*{clipped(str(event.anchor))} has no anchor that ends before it: add &name"
                )
            return replace(self._anchors[event.anchor], line=line)
        if getattr(event, "tag", None) is not None:
            self.report(line, loc, f"the tag {clipped(str(event.tag))} is not supported: remove it")
        node = Node(line, self._value(event, loc))
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _value(self, event: Any, loc: Loc) -> Scalar | list[Node] | dict[str, Node]:
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            for item in self._until(yaml.SequenceEndEvent):
                items.append(self._node(item, (*loc, len(items))))
            return items
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(loc)
        try:
            return resolve(event.value, plain=event.style is None)
        except ValueError as error:
            self.report(_line(event), loc, str(error))
            return None

    def _mapping(self, loc: Loc) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for event in self._until(yaml.MappingEndEvent):
            line = _line(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise _StopError(line, loc, "a key is a list, a mapping or an alias: write it as a word")
            key = self._node(event, loc).value
            if key == "<<" and event.style is None:
                self.report(line, loc, "merge keys (<<) are not supported: write the keys out")
            elif not isinstance(key, str):
                self.report(line, loc, f"a key is {shown(key)}: keys are words, put it in quotes if it is one")
            value = self._node(next(self._events), (*loc, key if isinstance(key, str) else "?"))
            if isinstance(key, str) and key != "<<":
                if key in entries:
                    again = f"given twice, first on line {entries[key].line}: keep one"
                    self.report(line, (*loc, key), again)
                else:
                    entries[key] = replace(value, line=line)
        return entries

    def _until(self, end: type[yaml.Event]) -> Iterator[Any]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event


class _Expansion:
    """Turns the tree into plain values. An alias costs what it stands for, so a bomb is refused, not expanded."""

    def __init__(self) -> None:
        self._nodes = 0
        self._text = 0

    def plain(self, node: Node, loc: Loc) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _StopError(node.line, loc, f"aliases expand to more than {MAX_NODES} values: use fewer")
        if len(loc) > MAX_DEPTH:
            raise _StopError(node.line, loc[:2], f"aliases nest more than {MAX_DEPTH} deep: use fewer")
        value = node.value
        if isinstance(value, dict):
            self._count_text(sum(map(len, value)), node, loc)
            return {key: self.plain(child, (*loc, key)) for key, child in value.items()}
        if isinstance(value, list):
            return [self.plain(child, (*loc, index)) for index, child in enumerate(value)]
        if isinstance(value, str):
            self._count_text(len(value), node, loc)
        return value

    def _count_text(self, length: int, node: Node, loc: Loc) -> None:
        self._text += length
        if self._text > MAX_TEXT:
            raise _StopError(node.line, loc, f"aliases expand to more than {MAX_TEXT} characters: use fewer")


def _events(text: str) -> Iterator[Any]:
    """PyYAML's events; what it raises becomes `_StopError` with a line."""
    loader: Any = None
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_event():
            yield loader.get_event()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _StopError(line, (), f"the character {error.character:#x} is not allowed in YAML: remove it") from None
    except yaml.MarkedYAMLError as error:
        _raise_syntax(error)
    except (ValueError, OverflowError):
        # PyYAML passes "\UFFFFFFFF" to chr(), and `%YAML 1.<thousands of digits>` to int(), as they are.
        raise _StopError(loader.line + 1, (), "not valid YAML: an escape or a version is out of range") from None


def _raise_syntax(error: yaml.MarkedYAMLError) -> NoReturn:
    mark: Any = error.problem_mark or error.context_mark
    what = ", ".join(part for part in (error.context, error.problem) if part)
    advice = "indent with spaces, not tabs" if "'\\t'" in what else "check indentation, quotes and brackets"
    raise _StopError(mark.line + 1 if mark else 1, (), f"not valid YAML: {what}: {advice}") from None


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1
