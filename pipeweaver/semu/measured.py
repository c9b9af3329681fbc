"""Published step times, row by row, as jobs that the emulator can estimate.

Two sets of columns are known (`docs/semu.md` says what each means):

    vTrain     hidden, heads, layers, seq_len, global_batch, micro_batch, tp, dp, pp, num_gpus, iteration_ms
               and params_b in the multi-node file: GPT under Megatron-DeepSpeed on A100
    SimuMax    case, model, layers, seq_len, num_microbatches, tp, pp, dp, ep, cp, iteration_ms,
               peak_alloc_gib_by_rank: Llama 3 under Megatron core
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeweaver.semu.job import Framework, Job
from pipeweaver.semu.published import gpt, llama

VTRAIN = ("num_gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "seq_len", "tp", "dp", "pp")
SIMUMAX = ("case", "model", "layers", "tp", "pp", "dp", "ep", "cp", "seq_len", "num_microbatches")

MEGATRON_DEEPSPEED = Framework(
    fused_accumulation=False, overlapped_transfers=False, gradient_bytes=2, reduced_bytes=2, state_bytes=12, tied=True
)
"""Sends and receives stand between stages; gradients are summed in float16; embedding and head are one."""

MEGATRON_CORE = Framework(
    sequence_parallel=True, overlapped_transfers=False, sharded_optimizer=True, kept_weight_gradients=True
)
"""Sequence parallelism, float32 gradients added up in the matmuls, optimizer state over replicas. Transformer
Engine keeps one buffer per weight shape for gradients that were added up elsewhere."""

GPT_VOCABULARY = 50257
LLAMA3 = {
    "llama3-8b": {"hidden": 4096, "heads": 32, "key_heads": 8, "ffn": 14336},
    "llama3-70b": {"hidden": 8192, "heads": 64, "key_heads": 8, "ffn": 28672},
    "llama3-405b": {"hidden": 16384, "heads": 128, "key_heads": 16, "ffn": 53248},
}
LLAMA3_VOCABULARY = 128256
MOST = 1 << 22
"""Of anything that a row counts: more is a slip of the pen, and takes longer to emulate than anybody waits."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row: what ran, how long a step took, and the peak of allocated memory of each GPU where it is known."""

    name: str
    job: Job
    iteration_ms: float
    peak_gib: tuple[float, ...] = ()


def read_measured(path: str | Path) -> tuple[Measured, ...]:
    """All rows of a file.

    Raises ValueError, naming file, line and column, at columns that are neither set, at a value that is
    missing, no number, or not above zero, and at layouts that do not fit.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    with io.StringIO(text, newline="") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        if set(VTRAIN) <= set(columns):
            read = _vtrain
        elif set(SIMUMAX) <= set(columns):
            read = _simumax
        else:
            raise ValueError(
                f"{path}: columns {', '.join(columns)} are neither set that is known: "
                f"{', '.join((*VTRAIN, 'iteration_ms'))}; or {', '.join((*SIMUMAX, 'iteration_ms'))}"
            )
        rows = tuple(read(row, f"{path}:{line}") for line, row in enumerate(reader, start=2))
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def read_layer_profile(path: str | Path) -> dict[int, float]:
    """Forward milliseconds of one layer by local batch size, from a Galvatron profile: value times batch.

    Raises ValueError, naming file and key, at a value that is missing or not above zero.
    """
    table = json.loads(Path(path).read_text(encoding="utf-8"))
    found = {}
    for key, value in table.items():
        layer = re.fullmatch(r"layertype_0_bsz(\d+)(?:_seq\d+)?", key)
        if layer is not None:
            per_sample = number({key: None if value is None else str(value)}, key, str(path))
            found[int(layer[1])] = per_sample * int(layer[1])
    if not found:
        raise ValueError(f"{path}: no key layertype_0_bszN: no profile of a layer")
    return found


def number(row: Mapping[str, str | None], column: str, where: str) -> float:
    """A measurement above zero. Raises ValueError, naming the place, if it is none."""
    text = row.get(column)
    try:
        value = float(text) if text else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{where}: {column} = {text!r}: expected a measurement above zero")
    return value


def _whole(row: Mapping[str, str | None], column: str, where: str) -> int:
    value = number(row, column, where)
    if value != int(value) or value > MOST:
        raise ValueError(f"{where}: {column} = {row[column]!r}: expected a whole number of at most {MOST:,}")
    return int(value)


def _vtrain(row: Mapping[str, str | None], where: str) -> Measured:
    shape = {column: _whole(row, column, where) for column in VTRAIN}
    tp, dp, pp = shape["tp"], shape["dp"], shape["pp"]
    if tp * dp * pp != shape["num_gpus"]:
        raise ValueError(f"{where}: tp * dp * pp = {tp * dp * pp}, but num_gpus = {shape['num_gpus']}")
    if shape["hidden"] % shape["heads"]:
        raise ValueError(f"{where}: hidden = {shape['hidden']} does not divide into heads = {shape['heads']}")
    microbatches, rest = divmod(shape["global_batch"], shape["micro_batch"] * dp)
    if rest:
        raise ValueError(f"{where}: {shape['global_batch']} samples do not divide into {dp} replicas' microbatches")
    # The multi-node rows ran with recomputation and a vocabulary padded for Megatron, the others with neither.
    multi = "params_b" in row
    padding = 128 * tp
    vocabulary = -(-GPT_VOCABULARY // padding) * padding if multi else GPT_VOCABULARY // tp * tp
    framework = replace(MEGATRON_DEEPSPEED, recompute=multi)
    return Measured(
        name=f"hidden {shape['hidden']} layers {shape['layers']} microbatch {shape['micro_batch']} "
        f"x {microbatches} tp {tp} dp {dp} pp {pp}",
        job=Job(
            layers=gpt(hidden=shape["hidden"], heads=shape["heads"], vocabulary=vocabulary, sequence=shape["seq_len"]),
            num_layers=shape["layers"],
            sequence=shape["seq_len"],
            microbatch=shape["micro_batch"],
            num_microbatches=microbatches,
            tensor_parallel=tp,
            pipeline_parallel=pp,
            data_parallel=dp,
            dtype="float16",
            framework=framework,
        ),
        iteration_ms=number(row, "iteration_ms", where),
    )


def _simumax(row: Mapping[str, str | None], where: str) -> Measured:
    model = row["model"] or ""
    if model not in LLAMA3:
        raise ValueError(f"{where}: model = {model!r}: known are {', '.join(LLAMA3)}")
    for column in ("ep", "cp"):
        if _whole(row, column, where) != 1:
            raise ValueError(f"{where}: {column} = {row[column]}: expert and context parallelism are not emulated")
    tp, pp, dp = (_whole(row, column, where) for column in ("tp", "pp", "dp"))
    peaks = (row.get("peak_alloc_gib_by_rank") or "").split()
    if peaks and len(peaks) != tp * pp * dp:
        raise ValueError(f"{where}: {len(peaks)} values in peak_alloc_gib_by_rank for {tp * pp * dp} GPUs")
    padding = 128 * tp
    return Measured(
        name=row["case"] or where,
        job=Job(
            layers=llama(**LLAMA3[model], vocabulary=-(-LLAMA3_VOCABULARY // padding) * padding),
            num_layers=_whole(row, "layers", where),
            sequence=_whole(row, "seq_len", where),
            microbatch=1,
            num_microbatches=_whole(row, "num_microbatches", where),
            tensor_parallel=tp,
            pipeline_parallel=pp,
            data_parallel=dp,
            dtype="bfloat16",
            framework=MEGATRON_CORE,
        ),
        iteration_ms=number(row, "iteration_ms", where),
        peak_gib=tuple(number({"peak_alloc_gib_by_rank": p}, "peak_alloc_gib_by_rank", where) for p in peaks),
    )
