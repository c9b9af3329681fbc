"""Mistakes in a file are one line each: file, line, key, value, and what would be right."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from pipeweaver import toml


class Oven(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    heat: Annotated[int, Meta(ge=1, le=300)]
    mode: Literal["fan", "grill"] = "fan"
    timer: float | None = None
    shelves: tuple[int, int] = (1, 2)
    weights: dict[str, Annotated[float, Meta(gt=0)]] = {}
    light: bool | Literal["dim"] = True

    def __post_init__(self) -> None:
        if self.mode == "grill" and self.heat < 200:
            raise ValueError(f"heat {self.heat} is too low to grill; 200 at least")


class Hob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plates: int = 4


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kitchen.toml"
    path.write_text(textwrap.dedent(text))
    return str(path)


def message(path: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ValueError) as caught:
        toml.convert(toml.read(path, overrides), "oven", Oven)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(path)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('heat = "hot"', ':2: oven.heat = "hot": expected a whole number, not a string'),
        ("heat = 0", ":2: oven.heat = 0: expected a whole number >= 1"),
        ("heat = 301", ":2: oven.heat = 301: expected a whole number <= 300"),
        ("heat = 1.5", ":2: oven.heat = 1.5: expected a whole number, not a decimal number"),
        ("heat = true", ":2: oven.heat = true: expected a whole number, not true or false"),
        ("heat = 9\nmode = 'fann'", ':3: oven.mode = "fann": expected one of "fan", "grill"'),
        ("heat = 9\nmoed = 'fan'", ':3: oven.moed = "fan": unknown key; did you mean mode?'),
        (
            "heat = 9\nxyzzy = 1",
            ":3: oven.xyzzy = 1: unknown key; known here: heat, mode, timer, shelves, weights, light",
        ),
        ("heat = 9\ntimer = 'x'", ':3: oven.timer = "x": expected a number, not a string'),
        ("heat = 9\ntimer = nan", ":3: oven.timer = NaN: expected a finite number"),
        (f"heat = {2**63}", f":2: oven.heat = {2**63}: expected a number that fits into 64 bits"),
        ("heat = 9\ntimer = 1979-05-27", ':3: oven.timer = "1979-05-27": expected a number, not a date'),
        ('heat = 9\nmode = "a\\u0000"', ':3: oven.mode = "a\\u0000": expected text without null characters'),
        ("heat = 9\nlight = 'green'", ':3: oven.light = "green": expected one of true, false, "dim"'),
        ("heat = 9\nshelves = [1]", ":3: oven.shelves = [1]: expected a list of length 2, not 1"),
        ("heat = 9\nshelves = [1, 'a']", ':3: oven.shelves[1] = "a": expected a whole number, not a string'),
        ("heat = 9\nweights = {a = 1, b = -1}", ":3: oven.weights.b = -1: expected a number > 0.0"),
        (
            "mode = 'grill'\nheat = 9",
            ":3: oven.heat = 9: heat 9 is too low to grill; 200 at least",
        ),
        ("mode = 'fan'", ":1: oven.heat: missing; it has no default"),
    ],
)
def test_each_mistake_is_one_line(tmp_path: Path, line: str, expected: str) -> None:
    assert message(write(tmp_path, f"[oven]\n{line}\n")) == expected


def test_a_good_table_with_comments_and_dotted_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "# kitchen\n[ oven ]  # hot\nheat = 200\nweights.a = 2\nweights.b = 0.5\n")
    assert toml.convert(toml.read(path), "oven", Oven) == Oven(heat=200, weights={"a": 2.0, "b": 0.5})


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "kitchen.toml").write_bytes(b"\xef\xbb\xbf[oven]\nheat = 3\n")
    assert toml.convert(toml.read(tmp_path / "kitchen.toml"), "oven", Oven).heat == 3


def test_dotted_key_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[oven]\nheat = 200\nweights.a = 2\nweights.b = -0.5\n")
    assert message(path) == ":4: oven.weights.b = -0.5: expected a number > 0.0"


def test_override_is_named_instead_of_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "[oven]\nheat = 200\n")
    assert message(path, ("oven.heat=0",)) == "--set oven.heat=0: oven.heat = 0: expected a whole number >= 1"
    assert toml.convert(toml.read(path, ("oven.mode=grill", "oven.timer = 1.5")), "oven", Oven) == Oven(
        heat=200, mode="grill", timer=1.5
    )


@pytest.mark.parametrize("override", ["oven", "=3", "oven..heat=3", ""])
def test_override_without_key_or_value(tmp_path: Path, override: str) -> None:
    with pytest.raises(ValueError, match=r"--set .*: expected KEY=VALUE, such as run.steps=10"):
        toml.read(write(tmp_path, ""), (override,))


def test_override_below_a_value(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--set oven.heat.x=3: heat is not a table"):
        toml.read(write(tmp_path, "[oven]\nheat = 3\n"), ("oven.heat.x=3",))


def test_type_chooses_the_record(tmp_path: Path) -> None:
    records = {"oven": Oven, "hob": Hob}
    document = toml.read(write(tmp_path, "[a]\ntype = 'hob'\nplates = 2\n[b]\n[c]\ntype = 'hobb'\n[d]\ntype = 3\n"))
    assert toml.convert_one_of(document, "a", records) == Hob(plates=2)
    for name, line, shown in (
        ("b", 4, ": missing; it is"),
        ("c", 6, ' = "hobb": expected'),
        ("d", 8, " = 3: expected"),
    ):
        with pytest.raises(ValueError) as caught:
            toml.convert_one_of(document, name, records)
        assert str(caught.value) == f'{document.path}:{line}: {name}.type{shown} one of "oven", "hob"'


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.toml: cannot be read: No such file or directory$"):
        toml.read(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        toml.read(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    with pytest.raises(ValueError, match=r"latin.toml: not UTF-8 text: byte 5 is 0xe9"):
        toml.read(tmp_path / "latin.toml")
    with pytest.raises(ValueError, match=r"kitchen.toml: not valid TOML: .*line 1"):
        toml.read(write(tmp_path, "a = = 3"))


def test_a_value_where_a_table_belongs(tmp_path: Path) -> None:
    assert message(write(tmp_path, "oven = 3\n")) == ":1: oven = 3: expected a table, [oven]"
