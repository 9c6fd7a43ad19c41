"""YAML with positions: bounded, without surprises, every problem at its line and column.

PyYAML composes the node tree; turning it into values is done here, because YAML 1.1 reads too much into plain
words (`off` is a boolean, `1:30` is ninety, `010` is eight) and says nothing of duplicate keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tuner.errors import Problem, SpaceError

MAX_BYTES = 256 * 1024
MAX_NODES = 20_000
MAX_DEPTH = 24
MAX_DIGITS = 18

Path = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Mark:
    """Where something starts; counted from 1."""

    line: int
    column: int


@dataclass
class Document:
    """A parsed file: its value, where each part of it stands, and how its booleans were written."""

    source: str
    text: str
    value: dict[str, Any]
    values: dict[Path, Mark] = field(default_factory=dict)
    keys: dict[Path, Mark] = field(default_factory=dict)
    booleans: dict[Path, str] = field(default_factory=dict)

    def mark(self, path: Path, *, key: bool = False) -> Mark:
        """Return where `path` stands, or the nearest part of the file above it."""
        if key and path in self.keys:
            return self.keys[path]
        for end in range(len(path), -1, -1):
            if path[:end] in self.values:
                if end < len(path) and end > 0 and path[:end] in self.keys:
                    return self.keys[path[:end]]  # something is missing in this mapping: show its name
                return self.values[path[:end]]
        return Mark(1, 1)

    def problem(self, path: Path, message: str, hint: str = "", *, key: bool = False) -> Problem:
        """Return a problem at `path`."""
        mark = self.mark(path, key=key)
        return Problem(mark.line, mark.column, message, hint)


def read_document(data: bytes, source: str) -> Document:
    """Parse one YAML mapping.

    Raises:
        SpaceError: not UTF-8, not YAML, too large, not a mapping, or with what YAML makes ambiguous.
    """
    text = _decode(data, source)
    root = _compose(text, source)
    if root is None:
        raise SpaceError(source, [Problem(1, 1, "the file is empty", "`tuner init` writes one to start from")])
    if not isinstance(root, yaml.MappingNode):
        raise SpaceError(source, [Problem(*_start(root), "expected a mapping at the top", _TOP_HINT)])
    reader = _Reader(Document(source, text, {}))
    value = reader.convert(root, (), 0)
    if reader.problems:
        raise SpaceError(source, reader.problems)
    if isinstance(value, dict):
        reader.document.value = value
    return reader.document


_TOP_HINT = "start with `schema: 1`, then study, engine, search, workload, objectives"


def _decode(data: bytes, source: str) -> str:
    if len(data) > MAX_BYTES:
        message = f"the file has {len(data)} bytes, more than {MAX_BYTES}: this is no search space"
        raise SpaceError(source, [Problem(1, 1, message)])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = len(before) - (before.rfind(b"\n") + 1) + 1
        byte = f"byte 0x{data[error.start]:02x}"
        raise SpaceError(source, [Problem(line, column, f"not UTF-8: {byte}", "save the file as UTF-8")]) from error


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise SpaceError(source, [Problem(line, column, f"not YAML: {message}", _syntax_hint(message))]) from error
    except yaml.reader.ReaderError as error:
        at = error.position if isinstance(error.position, int) else 0
        line, column = text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1
        raise SpaceError(source, [Problem(line, column, "not YAML: a control character", "remove it")]) from error
    except RecursionError as error:
        message = f"nested deeper than {MAX_DEPTH} levels"
        raise SpaceError(source, [Problem(1, 1, message)]) from error
    except (ValueError, OverflowError) as error:  # escapes such as "\UFFFFFFFF" end in chr()
        message = f"not YAML: {' '.join(str(error).split())}"
        raise SpaceError(source, [Problem(1, 1, message, "an escape in a quoted string is wrong")]) from error


def _syntax_hint(message: str) -> str:
    if "\\t" in message:
        return "YAML is indented with spaces, never tabs"
    if "single document" in message:
        return "one file holds one search space: remove the `---`"
    if "mapping values are not allowed" in message:
        return "a value that holds `: ` needs quotes, or a line above is not indented as it should be"
    if "expected ',' or" in message or "expected the node content" in message:
        return "a bracket or brace is not closed, or a comma is missing"
    if "undefined alias" in message:
        return "a word that starts with * needs quotes"
    return ""


def _start(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


class _Reader:
    """Turns nodes into values and collects every problem on the way."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self._count = 0
        self._open: set[int] = set()

    def problem(self, node: yaml.Node, message: str, hint: str = "") -> None:
        self.problems.append(Problem(*_start(node), message, hint))

    def convert(self, node: yaml.Node, path: Path, depth: int) -> Any:
        """Return the value of `node`; None after a problem."""
        self._count += 1
        if self._count > MAX_NODES:
            if self._count == MAX_NODES + 1:
                self.problem(node, f"more than {MAX_NODES} values once aliases are expanded")
            return None
        self.document.values.setdefault(path, Mark(*_start(node)))
        if depth > MAX_DEPTH:
            self.problem(node, f"nested deeper than {MAX_DEPTH} levels")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self.problem(node, "an alias that contains itself")
            return None
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self.problem(node, f"the tag {node.tag!r:.60} means nothing here", "remove it")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return dict(self._entries(node, path, depth))
            return [self.convert(child, (*path, i), depth + 1) for i, child in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _entries(self, node: yaml.MappingNode, path: Path, depth: int) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key is None:
                continue
            if key in seen:
                self.problem(key_node, f"{key} is given twice", f"the first is in line {seen[key]}")
                continue
            seen[key] = _start(key_node)[0]
            self.document.keys.setdefault((*path, key), Mark(*_start(key_node)))
            yield key, self.convert(value_node, (*path, key), depth + 1)

    def _key(self, node: yaml.Node) -> str | None:
        if isinstance(node, yaml.ScalarNode):
            if node.tag == _TAG + "str" and not _unfit(node.value):
                return str(node.value)
            if node.tag == _TAG + "merge":
                self.problem(node, "merge keys (<<) are not read here", "write the entries out")
                return None
            if node.tag == _TAG + "bool":
                self.problem(node, f"YAML reads the key {node.value} as a boolean", f'write "{node.value}"')
                return None
        shown = repr(node.value)[:40] if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        self.problem(node, f"a key must be a word, got {shown}", "quote it if it is meant as a word")
        return None

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text, kind = str(node.value), node.tag.removeprefix(_TAG)
        if kind in ("str", "value"):
            if _unfit(text):
                self.problem(node, "a control character or half a surrogate pair in a string")
            return text
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in _BOOLEANS:
            self.document.booleans[path] = text
            return _BOOLEANS[text.lower()]
        if kind == "int":
            return self._int(node, text)
        if kind == "float":
            return self._float(node, text)
        if kind == "timestamp":
            self.problem(node, f"YAML reads {text} as a date", f'a word is meant here: write "{text}"')
        elif kind == "merge":
            self.problem(node, "<< is not read here", 'write "<<" if the word is meant')
        else:
            self.problem(node, f"{text!r:.40} with the tag {node.tag!r:.60} means nothing here", "remove the tag")
        return None

    def _int(self, node: yaml.ScalarNode, text: str) -> int | None:
        if not _DECIMAL.fullmatch(text):
            hint = "write a decimal number, or quote it if a word is meant"
            self.problem(node, f"YAML reads {text[:40]} as a number in another base", hint)
            return None
        digits = text.replace("_", "")
        if len(digits) > MAX_DIGITS:
            self.problem(node, f"the number {digits[:12]}… is too large")
            return None
        return int(digits)

    def _float(self, node: yaml.ScalarNode, text: str) -> float | None:
        try:
            number = float(text.replace("_", ""))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            if ":" in text:
                self.problem(node, f"YAML reads {text[:40]} as a number in base 60", "quote it")
            else:
                self.problem(node, f"{text[:40]} is not a finite number")
            return None
        return number


def _unfit(text: str) -> bool:
    """Whether a string could not be written to a file or shown in a terminal."""
    return bool(_CONTROL.search(text)) or any(0xD800 <= ord(c) <= 0xDFFF for c in text)
