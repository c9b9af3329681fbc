"""Plans as files, and orders in the notation of torch.distributed.pipelining.

A plan file is JSON (or MessagePack, by the name's ending; either may be followed by .gz) of `Plan`, one object per plan. The notation, one
row per worker as CSV: `2F0` is the forward of part 0 of chunk 2, `1SEND_F3` and `2RECV_F3` hand the output of
part 3 from chunk 1 to chunk 2. It can be read back where a chain of chunks allows it:

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from pipeweaver.schedule.ir import Compute, Phase, Plan, Post, Stage

_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_IGNORED = re.compile(r"(\d+(SEND|RECV)_[FB]\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*|)")


def save_plans(plans: Sequence[Plan], path: Path) -> None:
    """Write the plans of a step: MessagePack if the name ends in .msgpack, else JSON; compressed if it ends in .gz."""
    encoder = msgspec.msgpack if _ending(path) == ".msgpack" else msgspec.json
    content = encoder.encode(list(plans))
    # No time in the file: equal plans give equal bytes.
    path.write_bytes(gzip.compress(content, compresslevel=1, mtime=0) if path.suffix == ".gz" else content)


def load_plans(path: Path) -> tuple[Plan, ...]:
    """Read the plans of a step. Raises ValueError naming the file if it is not a plan file."""
    decoder = msgspec.msgpack if _ending(path) == ".msgpack" else msgspec.json
    try:
        content = path.read_bytes()
        return decoder.decode(gzip.decompress(content) if path.suffix == ".gz" else content, type=tuple[Plan, ...])
    except (msgspec.DecodeError, RecursionError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a plan file: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def text(plan: Plan, *, transfers: bool = False) -> str:
    """The plan as CSV, one row per worker, with sends and receives where they are posted if `transfers`."""
    rows = []
    for worker, actions in enumerate(plan.actions):
        row = []
        for action in actions:
            if isinstance(action, Compute):
                row.append(str(action.stage))
            elif isinstance(action, Post) and transfers:
                row.append(_post_text(plan, worker, action.transfer))
        rows.append(",".join(row))
    return "\n".join(rows) + "\n"


def orders(text: str) -> tuple[tuple[Stage, ...], ...]:
    """The stages of each worker, read from CSV; sends, receives, shard and reduce actions are passed over.

    Raises ValueError naming row and column of what is not an action.
    """
    found = []
    for row, line in enumerate(text.strip().splitlines()):
        stages = []
        for column, cell in enumerate(part.strip() for part in line.split(",")):
            if match := _COMPUTE.fullmatch(cell):
                stages.append(Stage(int(match[1]), int(match[3]), cast(Phase, match[2])))
            elif not _IGNORED.fullmatch(cell):
                raise ValueError(
                    f"row {row + 1}, column {column + 1}: {cell!r} is not an action such as 2F0 or 1SEND_F3"
                )
        found.append(tuple(stages))
    return tuple(found)


def _post_text(plan: Plan, worker: int, number: int) -> str:
    transfer = plan.transfers[number]
    edge = plan.edges[transfer.edge]
    ends = (edge.source, edge.destination) if transfer.phase == "F" else (edge.destination, edge.source)
    chunk, part = ends[0] if transfer.sender == worker else ends[1]
    return f"{chunk}{'SEND' if transfer.sender == worker else 'RECV'}_{transfer.phase}{part}"


def _ending(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
