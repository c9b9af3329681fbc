"""Machine factors from measured tables: the [matmul], [attention], [memory] and [links] of A100 and B200.

    python -m pipeweaver.semu.tables --data DIR     # prints and writes machines/A100.toml and B200.toml

The tables are SimuMax's (MooreThreads/SimuMax, Apache-2.0: `simumax/*.json` of the data folder): share of the peak of
matmuls by (m, k, n) and layout (TN is a forward, NN the gradient of the input, NT that of the weight, added up in
float32), of attention by heads and length, and latency and bandwidth of collectives. What is done with them:

- matmuls: every measured shape is kept (of weight gradients those that add up); the curve e / (1 + a/m + b/n + c/k), e by layout, is fitted through all of
  them by least squares of logarithms, with a loss that outliers do not dominate;
- attention: causal kernels were billed for the whole square, so factors are halved; rows of one length (4096), head
  dimension 128 and contiguous inputs, by FLOPs of the launch;
- memory and collectives: as they are, GiB/s in bytes/s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeweaver.data_folder import data_folder

Shape = tuple[int, int, int, float]
Floats = NDArray[np.float64]

LAYOUTS = {"TN": "forward", "NN": "input", "NT": "weight"}


def matmul_table(source: Mapping[str, Any]) -> dict[str, list[Shape]]:
    """[m, k, n, factor] rows by "forward", "input" and "weight". Raises ValueError, naming the row, at a bad factor."""
    rows: dict[str, list[Shape]] = {name: [] for name in LAYOUTS.values()}
    for text, factor in source["accelerator"]["op"]["matmul"]["accurate_efficient_factor"].items():
        shape = _shape(text)
        check_measurement(text, factor)
        if shape["layout"] == "NT" and shape["accumulate"] != "True":
            continue  # the same shape a second time, without adding up
        rows[LAYOUTS[shape["layout"]]].append((int(shape["m"]), int(shape["k"]), int(shape["n"]), round(factor, 4)))
    return {name: sorted(shapes) for name, shapes in rows.items()}


def matmul_curve(rows: Mapping[str, Sequence[Shape]]) -> dict[str, float]:
    """`forward`, `input`, `weight`, `half_m`, `half_n`, `half_k` of the curve through the rows."""
    kinds = np.array([list(LAYOUTS.values()).index(name) for name, shapes in rows.items() for _ in shapes])
    table = np.array([shape for shapes in rows.values() for shape in shapes], np.float64)
    m, k, n, factor = table.T
    inverse = np.stack([1 / m, 1 / n, 1 / k], axis=1)
    best, half = np.full(3, np.median(factor)), np.full(3, 50.0)
    # Gauss-Newton on log(factor), residuals beyond 5 % weighted down; the six unknowns stay above zero.
    for _ in range(200):
        loss = 1 + inverse @ half
        residual = np.log(factor) - np.log(best[kinds] / loss)
        slope = np.concatenate([np.eye(3)[kinds] / best[kinds, None], -inverse / loss[:, None]], axis=1)
        weight = np.sqrt(1 / np.sqrt(1 + (residual / 0.05) ** 2))
        step = np.linalg.lstsq(slope * weight[:, None], residual * weight, rcond=None)[0]
        best = np.clip(best + 0.5 * step[:3], 0.01, 1.0)
        half = np.maximum(half + 0.5 * step[3:], 0.0)
    names = (*LAYOUTS.values(), "half_m", "half_n", "half_k")
    return dict(zip(names, np.round(np.concatenate([best, half]), 4).tolist(), strict=True))


def curve_error(rows: Mapping[str, Sequence[Shape]], curve: Mapping[str, float]) -> float:
    """Mean relative error of the curve on the rows that it was fitted through."""
    errors = [
        abs(curve[name] / (1 + curve["half_m"] / m + curve["half_n"] / n + curve["half_k"] / k) / factor - 1)
        for name, shapes in rows.items()
        for m, k, n, factor in shapes
    ]
    return float(np.mean(errors))


def attention_rows(source: Mapping[str, Any], name: str, matmuls: float) -> list[tuple[float, float]]:
    """[FLOPs of the causal share, factor], ascending; `matmuls` are the two of forward or the five of backward."""
    rows: dict[float, float] = {}
    for text, factor in source["accelerator"]["op"][name]["accurate_efficient_factor"].items():
        shape = _shape(text)
        check_measurement(text, factor)
        heads, length, dim = int(shape["head_num"]), int(shape["seq_len"]), int(shape["v_head_dim"])
        plain = int(shape["qk_head_dim"]) == dim and shape["qkv_contiguous"] == "True"
        if plain and length == 4096:
            flops = matmuls * 2 * int(shape["batch"]) * heads * dim * length**2 / 2
            # Of shapes with equal FLOPs but other key heads the faster one: it is the kernel's, not a copy's.
            rows[flops] = max(rows.get(flops, 0.0), round(factor / 2, 4))
    return sorted(rows.items())


def check_measurement(name: str, value: float) -> None:
    """Raise ValueError, naming the measurement, unless it is a number above zero."""
    if not isinstance(value, int | float) or not np.isfinite(value) or value <= 0:
        raise ValueError(f"measurement {name!r} is {value!r}; it must be a number above zero")


def machine_text(head: str, source: Mapping[str, Any], links: str) -> str:
    """A whole machine file: `head` and `links` as given, factors from the table."""
    matmuls = matmul_table(source)
    curve = matmul_curve(matmuls)
    memory = source["accelerator"]["bandwidth"]
    lines = [head.strip(), "", "[matmul]"]
    lines += [f"{name} = {value}" for name, value in curve.items()]
    for name, shapes in matmuls.items():
        lines.append(f"measured_{name} = [")
        lines += [f"  [{m}, {k}, {n}, {factor}]," for m, k, n, factor in shapes]
        lines.append("]")
    lines += ["", "[attention]"]
    for name, table, count in (("forward", "sdp_fwd", 2), ("backward", "sdp_bwd", 5)):
        rows = ", ".join(f"[{flops:.0f}, {factor}]" for flops, factor in attention_rows(source, table, count))
        lines.append(f"{name} = [{rows}]")
    lines += [
        "",
        "[memory]",
        f"factor = {memory['default']['efficient_factor']}",
        f"access_ns = {memory['default']['latency_us'] * 1000}",
        f"factors = {{ {_loss_factors(memory)} }}",
        "",
        links.strip(),
        "",
    ]
    return "\n".join(lines)


def island_link(network: Mapping[str, Any], *, bandwidth: float | None = None) -> str:
    """[links.island] of a table's network; for another `bandwidth` only collectives keep their measured shares."""
    own = bandwidth is None
    bandwidth = network["bandwidth"]["gbps"] * 2**30 if own else bandwidth
    lines = ["[links.island]", f"bandwidth = {bandwidth:.6g}"]
    for name, key in (
        ("all_reduce", "all_reduce"),
        ("all_gather", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("point_to_point", "p2p"),
    ):
        found = network["op"][key]
        factor = found.get("efficient_factor", network["bandwidth"]["efficient_factor"])
        if key == "p2p" and not own:
            factor = 0.8
        hop = found.get("latency_us", network["bandwidth"]["latency_us"])
        fixed = found.get("fixed_latency_us", 0.0)
        lines.append(f"{name} = {{ factor = {factor}, hop_ns = {hop * 1000:.6g}, fixed_ns = {fixed * 1000:.6g} }}")
    return "\n".join(lines)


def _loss_factors(memory: Mapping[str, Any]) -> str:
    """Shares of the bandwidth that losses over a vocabulary reach, fused and not, forward and backward."""
    tables = {"ce": "vocabulary_loss", "ce_fusion": "cross_entropy"}
    found = {tables[name]: memory[name]["efficient_factor"] for name in tables if name in memory}
    return ", ".join(f"{name}{suffix} = {value:.4g}" for name, value in found.items() for suffix in ("", "_backward"))


def _shape(text: str) -> dict[str, str]:
    return dict(piece.split("=") for piece in text.split(", "))


A100 = """
# A100-SXM4-80GB. Written by `python -m pipeweaver.semu.tables`.
name = "A100"
source = "data sheet; links: NVLink 300 GB/s, 200 Gb/s per device between nodes; collectives: B200's measured shares and latencies"
calibrated = "matmuls, attention and memory: SimuMax tables of an A100-PCIe"
memory_bytes = 85_899_345_920
memory_bandwidth = 2.039e12
host_bandwidth = 2.5e10
devices_per_island = 8
peak_flops = { bfloat16 = 312e12, float16 = 312e12, float32 = 156e12 }
"""

B200 = """
# B200-SXM. Written by `python -m pipeweaver.semu.tables`.
name = "B200"
source = "data sheet, and SimuMax tables of an 8-GPU B200 node; between nodes 400 Gb/s per device, not measured"
calibrated = "matmuls, attention, memory and links inside a node: SimuMax tables of a B200"
memory_bytes = 193_273_528_320
memory_bandwidth = 8.589934592e12
host_bandwidth = 5e10
devices_per_island = 8
peak_flops = { bfloat16 = 2250e12, float16 = 2250e12, float32 = 1125e12 }
"""


def cluster_link(bandwidth: float) -> str:
    """[links.cluster] of a network that nobody measured."""
    factors = "{ factor = 0.8, hop_ns = 10000, fixed_ns = 20000 }"
    lines = ["[links.cluster]", f"bandwidth = {bandwidth:.6g}"]
    lines += [f"{name} = {factors}" for name in ("all_reduce", "all_gather", "reduce_scatter", "point_to_point")]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write machines/A100.toml and B200.toml from measured tables.")
    parser.add_argument("--data", help="folder of measured data")
    folder = data_folder(parser.parse_args().data) / "simumax"
    sources = {name: json.loads((folder / file).read_text()) for name, file in _FILES.items()}
    network = sources["B200"]["networks"]["high_intra_node"]
    links = {
        "A100": island_link(network, bandwidth=3e11) + "\n\n" + cluster_link(2.5e10),
        "B200": island_link(network) + "\n\n" + cluster_link(5e10),
    }
    for name, head in (("A100", A100), ("B200", B200)):
        text = machine_text(head, sources[name], links[name])
        path = Path(__file__).parent / "machines" / f"{name}.toml"
        path.write_text(text)
        rows = matmul_table(sources[name])
        error = curve_error(rows, matmul_curve(rows))
        print(f"{path}: {sum(map(len, rows.values()))} matmuls, curve off by {error:.1%} on the mean")


_FILES = {"A100": "a100_pcie.json", "B200": "b200_bf16_ceperm.json"}

if __name__ == "__main__":
    main()
