"""Costs of stages: sums of their layers, shared between equal chunks, spread over devices, overridden by rules."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pipeweaver.costs import Costs
from pipeweaver.data.table import ItemTable
from pipeweaver.model.graph import ModelGraph
from pipeweaver.model.language import LanguageConfig
from pipeweaver.model.language import language as text_model
from pipeweaver.schedule.groups import static_bytes
from pipeweaver.schedule.ir import Chunk, Placement
from pipeweaver.semu.costs import SemuCosts
from pipeweaver.semu.counts import Operator
from pipeweaver.semu.latency import Launch
from pipeweaver.semu.machine import load_machine
from pipeweaver.semu.optimizer import Optimizer
from tests.semu.layers import WIDTHS, image, text, tiny_vlm

IMAGES = [image(0, 8, 8), image(1, 4, 12)]
TEXTS = [text(0, 40), text(1, 30)]
LINKS = [[IMAGES[0]], [IMAGES[1]]]


def costs(**options: object) -> SemuCosts:
    machine = load_machine(str(options.pop("machine", "H800")))
    layers = int(options.pop("layers", 4))  # type: ignore[call-overload]
    return SemuCosts(tiny_vlm(layers), machine, widths=WIDTHS, **options)  # type: ignore[arg-type]


def language(start: int, stop: int, worker: int = 0) -> Chunk:
    return Chunk(task="main", module="language", start=start, stop=stop, worker=worker)


def test_it_is_what_planners_ask() -> None:
    found: Costs = costs()
    assert "H800" in found.source and "not calibrated" in found.source


def test_chunks_add_up_to_the_module() -> None:
    found = costs()
    parts = [found.stage(language(i, i + 1), TEXTS, LINKS) for i in range(4)]
    whole = found.stage(language(0, 4), TEXTS, LINKS)
    for name in ("forward_ns", "backward_ns", "input_ns", "weight_ns"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name), abs=4)
    assert sum(part.loaded_bytes for part in parts) == whole.loaded_bytes == 2 * 70 * 8
    # Between chunks activations travel instead of being saved: three boundaries of 70 rows of 64 bfloat16; and
    # each chunk holds rotary angles, 2 tables of 70 x 4, that layers of one chunk share.
    between, angles = 70 * 64 * 2, 2 * 70 * 4 * 2
    assert sum(part.saved_bytes for part in parts) + 3 * between - 3 * angles == whole.saved_bytes
    assert whole.input_ns + whole.weight_ns == whole.backward_ns > whole.forward_ns > 0


def test_equal_questions_have_equal_answers_in_any_order() -> None:
    first, second = costs(), costs()
    questions = [(language(1, 2), TEXTS, LINKS), (language(0, 4), TEXTS[:1], LINKS[:1]), (language(1, 3), TEXTS, LINKS)]
    answers = [first.stage(*question) for question in questions]
    assert answers == [second.stage(*question) for question in reversed(questions)][::-1]
    assert (
        first.stage(language(1, 2, worker=3), TEXTS, LINKS) == answers[0] == first.stage(language(2, 3), TEXTS, LINKS)
    )


def test_absent_is_legal() -> None:
    found = costs()
    vision = Chunk(task="main", module="vision", start=0, stop=4, worker=0)
    assert found.stage(vision, [], []).forward_ns >= 0
    assert found.stage(language(0, 4), TEXTS, [[], []]).forward_ns > 0


def test_frozen_encoders_have_no_backward() -> None:
    graph = tiny_vlm(2, trainable=False)
    found = SemuCosts(graph, load_machine("H800"), widths=WIDTHS)
    vision = Chunk(task="main", module="vision", start=0, stop=2, worker=0)
    cost = found.stage(vision, IMAGES, [[], []])
    assert cost.forward_ns > 0
    assert (cost.backward_ns, cost.saved_bytes, cost.weight_bytes) == (0, 0, 0)
    assert found.parameter_bytes("vision.layers.0") == found.optimizer_ns("vision.layers.0") == 0
    assert found.static_bytes("vision.layers.0") > 0


def useful_ns(costs: SemuCosts, copies: int = 1) -> int:
    table = ItemTable.of_part(TEXTS * copies, LINKS * copies)
    return costs.useful_ns("language", table, range(copies * len(TEXTS)))


def test_useful_work_does_not_depend_on_the_part() -> None:
    found = costs()
    whole = useful_ns(found, 8)
    assert useful_ns(found) * 8 == pytest.approx(whole, rel=0.02)
    stage = found.stage(language(0, 4), TEXTS, LINKS)
    assert useful_ns(found) < stage.forward_ns + stage.backward_ns


def test_tensor_parallel_workers_divide_work_and_share_memory() -> None:
    big = [text(i, 2048) for i in range(4)]
    links: list[list[object]] = [[] for _ in big]
    one, four = costs(), costs(tensor_parallel=4)
    alone, spread = (c.stage(language(1, 3), big, links) for c in (one, four))  # type: ignore[arg-type]
    assert spread.forward_ns != alone.forward_ns
    # What the group saves altogether is what one device would, but for what each keeps in full.
    assert alone.saved_bytes <= spread.saved_bytes < 1.2 * alone.saved_bytes
    assert one.static_bytes("language.layers.1") <= four.static_bytes("language.layers.1")
    assert four.transfer_ns(0, 1, 1 << 30) < one.transfer_ns(0, 1, 1 << 30)
    assert four.transfer_ns(0, 2, 1 << 30) > four.transfer_ns(0, 1, 1 << 30)  # two workers of four fill an island
    assert four.transfer_ns(1, 1, 1 << 30) == 0


def test_optimizer_state_may_be_shared_out() -> None:
    whole, shared = costs(), costs(optimizer=Optimizer(gradient=4, state=12, shards=4))
    parameters = whole.parameter_bytes("language.layers.1")
    assert whole.static_bytes("language.layers.1") == parameters // 2 * 18
    assert shared.static_bytes("language.layers.1") == parameters // 2 * 9
    assert shared.optimizer_ns("language.layers.1") < whole.optimizer_ns("language.layers.1")


def test_rules_override_operators_and_coverage_says_so() -> None:
    def rule(operator: Operator, launch: Launch) -> float | None:
        return 1e6 if operator.kind == "attention" else None

    plain, ruled = costs(), costs(rules=(rule,))
    question = (language(1, 2), TEXTS, LINKS)
    extra = ruled.stage(*question).forward_ns - plain.stage(*question).forward_ns
    assert 0.9e6 < extra < 1e6
    assert plain.coverage.guessed_share == 1
    assert 0 < ruled.coverage.guessed_share < 0.5
    assert ruled.coverage.num_guessed == plain.coverage.num_guessed - 2


def test_a_calibrated_machine_guesses_nothing() -> None:
    found = costs(machine="B200")
    found.stage(language(0, 4), TEXTS, LINKS)
    assert found.coverage.guessed_share == 0


def test_memory_strategies_trade_bytes_for_time() -> None:
    found = costs()
    options = found.strategies(language(0, 3), TEXTS, LINKS)
    assert len(options) == 4  # before, and three layers
    keep, attention, layer, offload = (
        options[2][name] for name in ("keep", "recompute-attention", "recompute", "offload")
    )
    assert keep.extra_ns == 0 and keep.offload_ns == 0
    assert keep.saved_bytes > attention.saved_bytes > layer.saved_bytes == offload.saved_bytes == 0
    forward = found.stage(language(1, 2), TEXTS, LINKS).forward_ns
    assert 0 < attention.extra_ns < layer.extra_ns <= forward
    assert offload.offload_ns == round(1e9 * keep.saved_bytes / found.machine.host_bandwidth)
    frozen = SemuCosts(tiny_vlm(2, trainable=False), load_machine("H800"), widths=WIDTHS)
    vision = Chunk(task="main", module="vision", start=0, stop=2, worker=0)
    assert [set(option) for option in frozen.strategies(vision, IMAGES, [[], []])] == [{"keep"}] * 4


def test_tied_parameters_are_held_once_where_both_ends_are() -> None:
    config = LanguageConfig(layers=2, hidden=64, heads=8, kv_heads=4, ffn=96, vocab=128, tied=True)
    graph = ModelGraph(modules=(text_model("language", config, []),), flows=())
    found = SemuCosts(graph, load_machine("H800"))
    whole = Chunk(task="main", module="language", start=0, stop=2, worker=0)
    halves = (replace(whole, stop=1), replace(whole, start=1, worker=1))
    (together,) = static_bytes(graph, Placement(workers=1, chunks=(whole,)), found)
    apart = static_bytes(graph, Placement(workers=2, chunks=halves), found)
    embedding = 128 * 64 * (2 + 4 + 12)
    assert sum(apart) - together == embedding == found.static_bytes("language.before.embedding.weight")
