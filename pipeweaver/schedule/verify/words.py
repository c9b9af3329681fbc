"""How the verifier speaks: its error, and the names of actions and buffers."""

from __future__ import annotations

from pipeweaver.schedule.ir import (
    Action,
    Buffer,
    Compute,
    Load,
    Offload,
    Post,
    Reduce,
    Reload,
    Settle,
    Wait,
)


class PlanError(ValueError):
    """A plan that must not run. `rule` names the rule of this module's docstring that it breaks."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def buffer_name(buffer: Buffer) -> str:
    return f"{buffer.kind} {buffer.first}" + ("" if buffer.kind == "received" else f".{buffer.second}")


def describe(action: Action) -> str:
    match action:
        case Compute():
            return str(action.stage)
        case Post() | Wait():
            return f"{type(action).__name__.lower()} of transfer {action.transfer}"
        case Load() | Offload() | Reload() | Settle():
            return f"{type(action).__name__.lower()} of part {action.part} of chunk {action.chunk}"
        case Reduce():
            return f"reduction of group {action.group}"
        case _:
            return type(action).__name__.lower()
