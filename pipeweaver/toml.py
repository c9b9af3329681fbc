"""TOML tables to typed records, every mistake one line with file, line, key, value and what would be right.

    run.toml:3: run.steps = "ten": expected a whole number >= 1, not a string
    run.toml:7: run.stepz = 10: unknown key; did you mean steps?
    --set run.steps=0: run.steps = 0: expected a whole number >= 1

Records are msgspec structs; their constraints are the annotations (`Annotated[int, Meta(ge=1)]`) and what
`__post_init__` raises as ValueError. A table whose record depends on its `type` key goes through `convert_one_of`.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

Record = TypeVar("Record", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A parsed file. `lines` maps dotted paths to line numbers, `overrides` to the text of a `--set`."""

    path: str
    table: dict[str, Any]
    lines: dict[str, int]
    overrides: dict[str, str]

    def error(self, path: str, what: str) -> ValueError:
        """One line about the value at a dotted path, or about the nearest table that the file does have."""
        where, value = self.path, _value_at(self.table, path)
        near = path
        while near and near not in self.lines and near not in self.overrides:
            near = near[: max(near.rfind("."), near.rfind("["), 0)]
        if near in self.overrides:
            where = f"--set {self.overrides[near]}"
        elif near:
            where = f"{self.path}:{self.lines[near]}"
        shown = "" if value is None or isinstance(value, dict) else f" = {_shown(value)}"
        return ValueError(f"{where}: {path}{shown}: {what}")


def read(path: str | Path, overrides: Sequence[str] = ()) -> Document:
    """Parse a file and lay `key=value` overrides over it. Raises ValueError with one line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from None
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    changed: dict[str, str] = {}
    for override in overrides:
        key, equals, value = (piece.strip() for piece in override.partition("="))
        if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            raise ValueError(f"--set {override}: expected KEY=VALUE, such as run.steps=10")
        _set(table, key, value, override)
        changed[key] = override
    document = Document(path=str(path), table=table, lines=_lines(text), overrides=changed)
    _check_values(document, table, "")
    return document


def table_at(document: Document, path: str) -> dict[str, Any]:
    """The table at a dotted path ("" for the whole file); empty where the file has none."""
    value = _value_at(document.table, path) if path else document.table
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise document.error(path, f"expected a table, [{path}]")
    return value


def check_keys(document: Document, path: str, known: Sequence[str]) -> None:
    """Raise ValueError at the first key of the table at `path` ("" for the whole file) that is not known."""
    for key in table_at(document, path):
        if key not in known:
            raise document.error(_join(path, key), f"unknown key; {_closest(key, known)}")


def convert(
    document: Document,
    path: str,
    record: type[Record],
    *,
    ignore: Sequence[str] = (),
    given: Mapping[str, msgspec.Struct] | None = None,
) -> Record:
    """The table at `path` as a record; an absent table is an empty one. Keys in `ignore` are left aside, tables
    that were converted before are `given`."""
    table = {key: value for key, value in table_at(document, path).items() if key not in ignore} | dict(given or {})
    fields = [field.encode_name for field in msgspec.structs.fields(record)]
    check_keys(document, path, [*fields, *ignore])
    try:
        return msgspec.convert(table, record)
    except msgspec.ValidationError as error:
        raise _translated(document, path, record, _exact(table, record, str(error))) from None


def convert_one_of(document: Document, path: str, records: Mapping[str, type[Record]]) -> Record:
    """The table at `path` as the record that its `type` key names."""
    table = table_at(document, path)
    name = table.get("type")
    if name is None:
        raise document.error(_join(path, "type"), f"missing; it is one of {_listed(records)}")
    if not isinstance(name, str) or name not in records:
        raise document.error(_join(path, "type"), f"expected one of {_listed(records)}")
    record = records[name]
    own = any(field.encode_name == "type" for field in msgspec.structs.fields(record))
    return convert(document, path, record, ignore=() if own else ("type",))


def _translated(document: Document, path: str, record: type, message: str) -> ValueError:
    """msgspec's message in the user's words: "Expected `int`, got `str` - at `$.steps`"."""
    what, _, at = message.partition(" - at `$")
    at = at.rstrip("`").lstrip(".")
    where = _join(path, at)
    if found := re.fullmatch(r"Object missing required field `(\w+)`", what):
        return document.error(_join(where, found[1]), "missing; it has no default")
    if found := re.fullmatch(r"Object contains unknown field `(.+)`", what):
        return document.error(_join(where, found[1]), "unknown key")
    if what.startswith("Invalid enum value"):
        return document.error(where, f"expected one of {', '.join(_choices(record, at))}")
    if found := re.fullmatch(r"Expected `([^`]+)`(.*?)(?:, got `?(\w+)`?)?", what):
        words = " or ".join(_WORDS.get(name, name) for name in found[1].split(" | ") if name != "null")
        given = "a decimal number" if found[3] == "float" else _WORDS.get(found[3], found[3])
        got = f", not {given}" if found[3] else ""
        return document.error(where, f"expected {words}{found[2]}{got}")
    # Raised by the record itself. "lr = -1: must be above 0" or "heat 9 is too low" is about the key it begins with.
    first = re.split(r"[ :]", what, maxsplit=1)[0]
    if first not in table_at(document, where):
        return document.error(where, what)
    return document.error(_join(where, first), re.sub(r"^\w+ = [^:]*: ", "", what))


def _exact(table: dict[str, Any], record: type, message: str) -> str:
    """The message with the key of a mapping, which msgspec leaves open: `$.loss_weights[...]`."""
    name, unknown, _ = message.partition(" - at `$.")[2].partition("[...]")
    if unknown and isinstance(table.get(name), dict):
        for key, value in table[name].items():
            try:
                msgspec.convert({**table, name: {key: value}}, record)
            except msgspec.ValidationError:
                return message.replace("[...]", f".{key}")
    return message


_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "date": "a date",
    "datetime": "a date",
    "time": "a time",
}


def _choices(record: type, at: str) -> list[str]:
    """Values that the record allows at a path inside it, as they are written in TOML."""
    found = msgspec.inspect.type_info(record)
    for key in at.split("."):
        if isinstance(found, msgspec.inspect.StructType):
            found = next(field.type for field in found.fields if field.encode_name == key.split("[")[0])
    options = found.types if isinstance(found, msgspec.inspect.UnionType) else (found,)
    words = ["true", "false"] if any(isinstance(option, msgspec.inspect.BoolType) for option in options) else []
    literals = [option for option in options if isinstance(option, msgspec.inspect.LiteralType)]
    return words + [_shown(value) for option in literals for value in option.values]


def _closest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"


def _listed(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path and key and not key.startswith("[") else path + key


def _value_at(table: Any, path: str) -> Any:
    """The value at a dotted path ("run.steps", "model.flows[0]"), or None."""
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(table, dict):
            table = table.get(key)
        elif isinstance(table, list) and key.isdigit() and int(key) < len(table):
            table = table[int(key)]
        else:
            return None
    return table


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _set(table: dict[str, Any], key: str, text: str, override: str) -> None:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word: --set policy.name=gpipe
    *tables, last = key.split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {override}: {name} is not a table")
    table[last] = value


def _check_values(document: Document, value: Any, path: str) -> None:
    """What no setting can be, whatever its record: TOML allows it, and libraries fail on it in words of their own."""
    if isinstance(value, float) and not math.isfinite(value):
        raise document.error(path, "expected a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise document.error(path, "expected a number that fits into 64 bits")
    if isinstance(value, str) and "\0" in value:
        raise document.error(path, "expected text without null characters")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_values(document, inner, _join(path, key))
    if isinstance(value, list):
        for position, inner in enumerate(value):
            _check_values(document, inner, f"{path}[{position}]")


_HEADER = re.compile(r"\s*\[\s*([\w.\-\"' ]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"\s*([\w.\-\"' ]+?)\s*=")


def _lines(text: str) -> dict[str, int]:
    """Line numbers of tables and keys, from the text: tomllib does not report them."""
    found: dict[str, int] = {}
    header = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _HEADER.match(line):
            header = re.sub(r"[\"' ]", "", match[1])
            found.setdefault(header, number)
        elif match := _KEY.match(line):
            found.setdefault(_join(header, re.sub(r"[\"' ]", "", match[1])), number)
    return found
