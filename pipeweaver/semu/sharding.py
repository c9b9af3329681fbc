"""How a traced layer is cut over a tensor-parallel group, read off the trace itself.

Walking the forward pass, a tensor is one of three things on a device of the group:

    rows    its share of the rows, all columns: what enters and leaves a layer under sequence parallelism
    split   all rows, its share of the columns (heads, MLP width, vocabulary)
    whole   the same on every device: conditions per item, norm weights

A weight matmul on `rows` is column-parallel and makes `split`; one on `split` is row-parallel and makes `rows`
again (Megatron-LM, arXiv 1909.08053; with sequence parallelism arXiv 2205.05198). Everything between follows its
inputs. A column-parallel matmul that no row-parallel one follows before the layer's output (a patch embedding)
runs on each device's rows with the whole weight instead. So an MLP block x + down(gelu(up(norm(x)))) reads

    norm rows -> rows | gather x | up rows -> split | gelu | down split -> rows | scatter | add
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeweaver.semu.calls import Call, OperatorPhase, Trace

Cut = Literal["rows", "split", "whole"]
Role = Literal["column", "row", "vocabulary", "sequence", "whole"]
"""Of a parameter: how its matmul is cut. "sequence": each device its rows, with the whole weight."""

Divided = Literal["batch", "m", "k", "n", "none"]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a tensor-parallel group exchanges at one point of a layer; `storage` is the tensor, all rows of it.

    "enter": a column-parallel matmul reads it; "leave": a row-parallel one (or an embedding) made it;
    "loss": the statistics of a loss over a split vocabulary. In backward each is its mirror image; phase W
    stands for gathering a saved input again for the weight's gradient. `again`: one of forward, repeated in
    backward.
    """

    kind: Literal["enter", "leave", "loss"]
    phase: OperatorPhase
    storage: int
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """`cuts[s]` of each storage, `roles` of parameters, `divided[i]` the dimension that call i's matmul loses."""

    cuts: tuple[Cut, ...]
    roles: dict[str, Role]
    divided: tuple[Divided, ...]
    exchanges: tuple[Exchange, ...]


def shard(trace: Trace, *, whole_inputs: Collection[str] = ()) -> Sharding:
    """Decide how each tensor and matmul of a traced layer is cut; all inputs but `whole_inputs` come cut by rows."""
    uncut: set[str] = set()
    while True:
        cuts, roles = _walk(trace, whole_inputs, uncut)
        stray = _columns_that_leave(trace, cuts, roles)
        if not stray:
            break
        uncut |= stray
    divided = tuple(_divided(call, cuts, roles, trace) for call in trace.calls)
    return Sharding(cuts=tuple(cuts), roles=roles, divided=divided, exchanges=_exchanges(trace, cuts, roles))


def whole_operand(call: Call, cuts: Sequence[Cut], roles: dict[str, Role], trace: Trace) -> int | None:
    """Position (0, 1, 2 for A, B, C) of the one operand of a cut weight matmul that a device needs in full."""
    role = roles.get(call.parameter)
    if call.kind != "matmul" or role in (None, "whole") or len(call.operands) < 3:
        return None
    for position, storage in enumerate(call.operands):
        if role == "sequence":
            of_weight = call.phase == "W" and not call.again
            if trace.storages[storage].role == "parameter" or (of_weight and position == 2):
                return position
        elif cuts[storage] == "rows":
            return position
    return None


def _walk(trace: Trace, whole_inputs: Collection[str], uncut: set[str]) -> tuple[list[Cut], dict[str, Role]]:
    cuts: list[Cut] = ["whole"] * len(trace.storages)
    row_counts = set()
    for number, storage in enumerate(trace.storages):
        if storage.role == "input" and storage.name not in whole_inputs:
            cuts[number] = "rows"
            row_counts.add(storage.length)
    known = {n for n, storage in enumerate(trace.storages) if storage.role != "own"}
    roles: dict[str, Role] = {}
    output_cut: dict[int, Cut] = {}
    for call in trace.calls:
        if call.phase != "F" and not output_cut:
            output_cut = {number: cuts[number] for number in trace.outputs.values()}
            for name, gradient in trace.output_gradients.items():
                cuts[gradient] = cuts[trace.outputs[name]]
                known.add(gradient)
        cut = _result(call, cuts, roles, uncut, trace)
        for number, _ in call.writes:
            if number in known:
                continue
            known.add(number)
            # What is the same everywhere until it is spread over the rows (a condition per item) is cut with them.
            by_rows = cut == "whole" and call.phase == "F" and trace.storages[number].length in row_counts
            cuts[number] = "rows" if by_rows else cut
    for number, storage in enumerate(trace.storages):
        if storage.role in ("parameter", "gradient"):
            cuts[number] = "split" if roles.get(storage.name) in ("column", "row", "vocabulary") else "whole"
    return cuts, roles


def _result(call: Call, cuts: list[Cut], roles: dict[str, Role], uncut: set[str], trace: Trace) -> Cut:
    """The cut of what a call writes; decides a parameter's role where it is first used."""
    mine = {cuts[number] for number, _ in call.reads if trace.storages[number].role in ("input", "own")}
    if call.phase == "F" and call.parameter and call.parameter not in roles:
        if call.kind == "matmul":
            operand: Cut = "split" if "split" in mine else "rows" if "rows" in mine else "whole"
            forward: dict[Cut, Role] = {"rows": "column", "split": "row", "whole": "whole"}
            roles[call.parameter] = "sequence" if call.parameter in uncut else forward[operand]
        elif call.name == "aten.embedding":
            roles[call.parameter] = "vocabulary"
    role = roles.get(call.parameter)
    runs_forward = call.phase == "F" or call.again
    if call.kind == "matmul" and role is not None:
        if call.phase == "W" and not runs_forward:
            return "split" if role in ("column", "row") else "whole"
        made: dict[Role, Cut] = {
            "column": "split" if runs_forward else "rows",
            "row": "rows" if runs_forward else "split",
            "sequence": "rows",
            "vocabulary": "rows",
            "whole": "whole",
        }
        return made[role]
    if role == "vocabulary":
        return "rows" if runs_forward else "split"
    return "split" if "split" in mine else "rows" if "rows" in mine else "whole"


def _columns_that_leave(trace: Trace, cuts: list[Cut], roles: dict[str, Role]) -> set[str]:
    """Column-parallel parameters whose result reaches an output (not the loss) without a row-parallel one between."""
    wanted = {number for name, number in trace.outputs.items() if name != "loss" and cuts[number] == "split"}
    found: set[str] = set()
    for call in reversed(trace.calls):
        if call.phase != "F" or not wanted & {number for number, _ in call.writes}:
            continue
        if call.kind == "matmul" and roles.get(call.parameter) == "column":
            found.add(call.parameter)
        else:
            wanted |= {n for n, _ in call.reads if cuts[n] == "split" and trace.storages[n].role in ("input", "own")}
    return found


def _divided(call: Call, cuts: list[Cut], roles: dict[str, Role], trace: Trace) -> Divided:
    if call.kind == "memory":
        return "none"
    role = roles.get(call.parameter)
    if role is None:
        return "batch" if any(cuts[number] == "split" for number, _ in call.reads) else "none"
    position = whole_operand(call, cuts, roles, trace)
    by_position: dict[int | None, Divided] = {None: "none", 0: "n", 1: "m", 2: "k"}
    return by_position[position]


def _exchanges(trace: Trace, cuts: list[Cut], roles: dict[str, Role]) -> tuple[Exchange, ...]:
    exchanges: list[Exchange] = []

    def add(kind: Literal["enter", "leave", "loss"], phase: OperatorPhase, storage: int, again: bool = False) -> None:
        exchange = Exchange(kind=kind, phase=phase, storage=storage, again=again)
        if exchange not in exchanges:
            exchanges.append(exchange)

    entered: dict[str, int] = {}
    for call in trace.calls:
        role = roles.get(call.parameter)
        if call.kind == "matmul" and role in ("column", "row"):
            position = whole_operand(call, cuts, roles, trace)
            if position is None:
                continue
            storage = call.operands[position]
            if call.phase == "F" or call.again:
                add("enter" if role == "column" else "leave", call.phase, storage, call.again)
                entered.setdefault(call.parameter, storage)
            elif call.phase == "I" and role == "column":
                # Gradients of one input are summed before they are exchanged: once per input, not per weight.
                add("enter", "I", entered.get(call.parameter, storage))
            elif call.phase == "I":
                add("leave", "I", storage)
            elif role == "column":
                add("enter", "W", storage)
        elif role == "vocabulary" and call.name.startswith("aten.embedding"):
            rows = call.writes if call.phase == "F" or call.again else [r for r in call.reads if cuts[r[0]] == "rows"]
            for number, _ in rows[:1]:
                add("leave", call.phase, number, call.again)
    loss = trace.outputs.get("loss")
    if loss is not None and cuts[loss] == "split":
        add("loss", "F", loss)
    return tuple(exchanges)
