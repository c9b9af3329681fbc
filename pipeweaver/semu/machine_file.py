"""Write a machine as a file that `load_machine` reads.

save_machine(Path("mine.toml"), machine)        # [matmul], [attention], ... as machines/A100.toml has them
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from pipeweaver.semu.machine import Machine


def save_machine(path: Path, machine: Machine) -> None:
    """Written beside and moved into place, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{id(machine)}.partial")
    partial.write_text(machine_toml(machine))
    partial.replace(path)


def machine_toml(machine: Machine) -> str:
    """The text of a machine file, without what is as it is by default."""
    content = msgspec.to_builtins(machine)
    plain = {key: value for key, value in content.items() if not isinstance(value, dict) or key == "peak_flops"}
    lines = ["# Measured by `pipeweaver calibrate`. A factor is the share of the peak that is reached."]
    lines += [f"{key} = {_value(value)}" for key, value in plain.items() if value is not None]
    for key, value in content.items():
        if key not in plain and value:
            lines += _section(key, value)
    return "\n".join(lines) + "\n"


def _section(name: str, table: dict[str, Any]) -> list[str]:
    """[name] with its own values, then tables inside it that hold tables, then arrays of tables."""
    tables = {
        k: v
        for k, v in table.items()
        if isinstance(v, dict) and any(isinstance(x, dict | list | tuple) for x in v.values())
    }
    arrays = {k: v for k, v in table.items() if isinstance(v, list | tuple) and v and isinstance(v[0], dict)}
    own = {k: v for k, v in table.items() if k not in tables and k not in arrays and v not in ((), [], {})}
    lines = ["", f"[{name}]", *(f"{_key(k)} = {_value(v)}" for k, v in own.items())]
    for key, inner in tables.items():
        lines += _section(f"{name}.{_key(key)}", inner)
    for key, rows in arrays.items():
        for row in rows:
            lines += ["", f"[[{name}.{_key(key)}]]", *(f"{_key(k)} = {_value(v)}" for k, v in row.items())]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)
