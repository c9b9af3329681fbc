"""Machine files: all shipped ones load, bad ones are refused by name; factors and collectives have closed forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeweaver.semu.factors import attention_share, flat_factors, matmul_share
from pipeweaver.semu.machine import (
    Group,
    Machine,
    collective_ns,
    load_machine,
    machine_names,
    transfer_ns,
)
from pipeweaver.semu.tables import check_measurement, curve_error, matmul_curve, matmul_table

GOOD = """
name = "tiny"
source = "a test"
memory_bytes = 1000
memory_bandwidth = 1e9
host_bandwidth = 1e9
devices_per_island = 4
peak_flops = { float32 = 1e12 }

[matmul]
forward = 0.8
input = 0.7
weight = 0.6
half_m = 10
measured_forward = [[16, 16, 16, 0.25], [32, 32, 32, 0.9]]

[attention]
forward = [[1e6, 0.2], [1e8, 0.6]]
backward = [[1e6, 0.2]]

[memory]
factor = 0.5

[links.island]
bandwidth = 1e9
all_reduce = { factor = 0.5, hop_ns = 100, fixed_ns = 1000 }

[links.cluster]
bandwidth = 1e8
"""


def machine(tmp_path: Path, text: str = GOOD) -> Machine:
    path = tmp_path / f"m{abs(hash(text))}.toml"
    path.write_text(text)
    return load_machine(str(path))


def test_shipped_machines_load_and_say_what_they_rest_on() -> None:
    assert set(machine_names()) == {"A100", "A800", "H100", "H800", "H200", "H20", "B200", "cpu"}
    for name in machine_names():
        found = load_machine(name)
        assert found.name == name
        assert found.source
        assert bool(found.calibrated) == (name in ("A100", "B200"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "tiny"\n', "", "name: missing"),
        ("memory_bytes = 1000", "memory_bytes = -1", "memory_bytes = -1"),
        ("factor = 0.5\n", "factor = 0.5\nfactr = 1\n", "factr"),
        ("forward = 0.8", 'forward = "fast"', "forward"),
        ("forward = 0.8", "forward = 0", "forward = 0"),
        ("[[1e6, 0.2], [1e8, 0.6]]", "[[1e8, 0.2], [1e6, 0.6]]", "ascending"),
        ("bandwidth = 1e9\nall", "bandwidth = nan\nall", "finite"),
        ("[links.cluster]\nbandwidth = 1e8\n", "", "cluster"),
    ],
)
def test_bad_machine_files_are_refused_by_name(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError, match=r"m\d+\.toml") as error:
        machine(tmp_path, GOOD.replace(old, new))
    assert message in str(error.value)


def test_unknown_machines_and_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no machine 'B300'; there are A100"):
        load_machine("B300")
    with pytest.raises(ValueError, match="peak_flops for bfloat16"):
        machine(tmp_path).peak("bfloat16")


def test_matmul_factors(tmp_path: Path) -> None:
    factors = flat_factors(machine(tmp_path))
    assert matmul_share(factors, 0, 10.0, 5.0, 5.0) == pytest.approx(0.4)  # half of the best at the half dimension
    assert matmul_share(factors, 0, 16.0, 16.0, 16.0) == 0.25
    assert matmul_share(factors, 0, 32.0, 32.0, 32.0) == 0.8  # measured above what any size sustains
    assert matmul_share(factors, 2, 16.0, 16.0, 16.0) == pytest.approx(0.6 / (1 + 10 / 16))


def test_weights_measured_at_several_rows_have_a_curve_of_their_own(tmp_path: Path) -> None:
    curves = """
[[matmul.curves]]
phase = "F"
fixed = [5, 7]
factors = [[10, 0.1], [1000, 0.3]]

[[matmul.curves]]
phase = "W"
fixed = [7, 5]
factors = [[10, 0.2]]
"""
    factors = flat_factors(machine(tmp_path, GOOD + curves))
    assert matmul_share(factors, 0, 100.0, 5.0, 7.0) == pytest.approx(0.2)  # halfway in the logarithm
    assert matmul_share(factors, 0, 10.0, 5.0, 7.0) == pytest.approx(0.1)
    # Beyond the ends the general curve says how the share changes: half is lost at 10 rows.
    assert matmul_share(factors, 0, 2.0, 5.0, 7.0) == pytest.approx(0.1 * (1 + 1) / (1 + 5))
    assert matmul_share(factors, 0, 1e9, 5.0, 7.0) == pytest.approx(0.3 * (1 + 10 / 1000))
    assert matmul_share(factors, 0, 100.0, 7.0, 5.0) == pytest.approx(0.8 / (1 + 10 / 100))
    assert matmul_share(factors, 2, 7.0, 99.0, 5.0) == 0.2
    with pytest.raises(ValueError, match="matmul F 5 x 7"):
        machine(tmp_path, GOOD + curves.replace("[10, 0.1]", "[1000, 0.1]"))


def test_attention_factors(tmp_path: Path) -> None:
    factors = flat_factors(machine(tmp_path))
    assert attention_share(factors, 0, 1e7) == pytest.approx(0.4)
    assert attention_share(factors, 0, 1e12) == pytest.approx(0.6)
    assert 1e5 / attention_share(factors, 0, 1e5) == pytest.approx(1e6 / 0.2)  # no faster than the smallest measured


def test_collectives_are_rings(tmp_path: Path) -> None:
    tiny = machine(tmp_path)
    alone = Group(size=1, per_island=1)
    assert collective_ns(tiny, "all_reduce", 1000, alone) == 0
    island = Group(size=4, per_island=4)
    # 6 hops of 100 ns, 2 * 3/4 of 1000 bytes at half of 1 GB/s, 1000 ns for the call
    assert collective_ns(tiny, "all_reduce", 1000, island) == pytest.approx(1000 + 600 + 3000)
    assert collective_ns(tiny, "all_gather", 1000, island) == pytest.approx(750)
    one_each, four_each = Group(size=8, per_island=1), Group(size=8, per_island=4)
    assert collective_ns(tiny, "all_gather", 800, one_each) == pytest.approx(7000)
    assert collective_ns(tiny, "all_gather", 800, four_each) == pytest.approx(7000 / 4)  # four network devices
    assert transfer_ns(tiny, 1000, crosses=True, devices=4) == pytest.approx(2500)


def test_shipped_factors_are_those_of_the_tables(measured_data: Path) -> None:
    for name, file in (("A100", "a100_pcie.json"), ("B200", "b200_bf16_ceperm.json")):
        rows = matmul_table(json.loads((measured_data / "simumax" / file).read_text()))
        curve, found = matmul_curve(rows), load_machine(name).matmul
        for key, value in curve.items():
            assert getattr(found, key) == pytest.approx(value, rel=1e-3)
        for phase, shapes in rows.items():
            assert set(getattr(found, f"measured_{phase}")) == set(shapes)
        assert curve_error(rows, curve) < {"A100": 0.05, "B200": 0.11}[name]


@pytest.mark.parametrize("value", [-0.1, 0, float("nan"), None, "0.5"])
def test_bad_measurements_are_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="b=1, m=2"):
        check_measurement("b=1, m=2", value)  # type: ignore[arg-type]


def test_an_optimizer_may_run_from_caches(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(GOOD + "\n[optimizer]\nfactor = 2.2\n")
    assert load_machine(str(path)).optimizer.factor == 2.2
