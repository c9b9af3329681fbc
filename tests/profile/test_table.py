"""The real layers of a small model, profiled: bytes are exact at sizes that were not measured, times add up."""

import pytest
import torch

from pipeweaver.costs import StageCost
from pipeweaver.model.build import materialise
from pipeweaver.profile.layers import profile_layers
from pipeweaver.profile.measured import Profile
from pipeweaver.profile.table import TableCosts, fit_error, load_table, merge, save_table
from pipeweaver.profile.variants import variants
from tests.profile.cases import ENDS, chunk_of, draw_part, make_graph, run_counted


def test_a_block_of_every_kind_is_measured_once(graph, profile):
    assert set(profile.layers) == {v.name for v in variants(graph).values()}
    # before, block, after of both modules
    assert len(profile.layers) == 6
    for layer in profile.layers.values():
        assert min(layer.forward_ns) > 0 and min(layer.backward_ns) > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ends", ENDS)
def test_bytes_of_chunks_are_exact_at_sizes_not_measured(graph, batches, load, costs, ends, seed):
    chunk = chunk_of(*ends)
    items, links = draw_part(batches, chunk.module, seed)
    if not items:
        pytest.skip("a part without items")
    found = run_counted(graph, batches, load, chunk, items, links)
    cost = costs.stage(chunk, items, links)
    assert cost.saved_bytes == found.saved
    assert cost.loaded_bytes == found.loaded
    # Workspace is about an upper bound, and not far off.
    assert found.forward_workspace <= cost.forward_workspace_bytes <= 2 * found.forward_workspace + 65536
    workspace = found.backward_workspace
    assert workspace <= 1.01 * cost.backward_workspace_bytes <= 2 * max(0, workspace) + 65536


def test_a_chunk_is_the_sum_of_its_layers_and_one_stage(batches, costs):
    items, links = draw_part(batches, "language", 1)
    stage = costs.table.stage
    whole = costs.stage(chunk_of("language", 0, 3), items, links)
    cuts = [costs.stage(chunk_of("language", i, i + 1), items, links) for i in range(3)]
    assert whole.forward_ns == sum(cut.forward_ns for cut in cuts) - 2 * stage.forward_ns
    assert whole.backward_ns == sum(cut.backward_ns for cut in cuts) - 2 * stage.backward_ns
    assert all(type(value) is int for value in whole)


def test_useful_work_is_never_more_than_any_cut_into_parts_takes(batches, costs):
    microbatch = max((m for b in batches for m in b.microbatches), key=len)
    items = [i for b in batches for s in microbatch[:1] for i in b.samples[s].items if i.module == "vision"]
    links = [()] * len(items)
    useful = costs.useful_ns("vision", items, links)
    assert type(useful) is int
    assert len(items) > 2
    chunk = chunk_of("vision", 0, 3)

    def spent(parts):
        found = [costs.stage(chunk, [items[i] for i in part], [links[i] for i in part]) for part in parts]
        return sum(cost.forward_ns + cost.backward_ns for cost in found)

    one_by_one = spent([[i] for i in range(len(items))])
    together = spent([list(range(len(items)))])
    assert useful <= together <= one_by_one
    assert useful * 5 > together


def test_corrected_costs_scale_the_times_of_a_module_and_nothing_else(batches, costs):
    corrected = costs.corrected({"vision": 1.25})
    items, links = draw_part(batches, "vision", 2)
    plain, changed = (c.stage(chunk_of("vision", 0, 2), items, links) for c in (costs, corrected))
    assert changed.forward_ns == plain.forward_ns * 1250 // 1000
    assert changed.backward_ns == plain.backward_ns * 1250 // 1000
    assert changed.saved_bytes == plain.saved_bytes
    useful = costs.useful_ns("vision", items, links)
    assert corrected.useful_ns("vision", items, links) == useful * 1250 // 1000
    texts, sources = draw_part(batches, "language", 2)
    whole = chunk_of("language", 0, 3)
    assert corrected.stage(whole, texts, sources) == costs.stage(whole, texts, sources)
    assert corrected.source == "a profile, corrected: vision by 1.25"
    assert costs.source == costs.corrected({}).source == "a profile"


def test_links_and_reductions(costs):
    assert costs.transfer_ns(0, 0, 1 << 30) == 0
    assert costs.transfer_ns(0, 1, 1 << 19) == pytest.approx(1000 + (1 << 16), rel=0.01)
    assert costs.reduce_ns(1, 1 << 20) == 0
    assert costs.reduce_ns(2, 1 << 18) == pytest.approx(5000 + (1 << 18), rel=0.01)
    with pytest.raises(ValueError, match="link from worker 1 to 2 is not calibrated"):
        costs.transfer_ns(1, 2, 8)
    with pytest.raises(ValueError, match="reductions over 3 members are not calibrated"):
        costs.reduce_ns(3, 8)


def test_parameters_of_layers_and_of_one_by_name(graph, costs):
    layers = materialise(graph, [chunk_of("language", 0, 3)], seed=0)
    for name, module in layers.items():
        num_bytes = sum(p.numel() * 4 for p in module.parameters())
        assert costs.parameter_bytes(name) == num_bytes
        assert costs.static_bytes(name) == 4 * num_bytes
        assert costs.optimizer_ns(name) > 0
    embedding = layers["language.before"].embedding.weight
    assert costs.parameter_bytes("language.before.embedding.weight") == embedding.numel() * 4


def test_a_layer_that_was_not_calibrated_is_named(profile):
    table = merge([profile], fingerprint="f", source="a profile", dtype="float32")
    with pytest.raises(ValueError, match=r"not in the calibration.*hidden=64"):
        TableCosts(table, make_graph(hidden=64))
    # Depth is no new kind, frozen layers are.
    assert TableCosts(table, make_graph(layers=5)).stage(chunk_of("vision", 0, 5), [], []).forward_ns > 0
    with pytest.raises(ValueError, match="no backward; frozen"):
        TableCosts(table, make_graph(trainable=False))


def test_a_table_survives_its_file(tmp_path, graph, batches, costs):
    save_table(tmp_path / "deep" / "table.json", costs.table)
    loaded = load_table(tmp_path / "deep" / "table.json")
    assert loaded == costs.table
    items, links = draw_part(batches, "vision", 3)
    chunk = chunk_of("vision", 0, 1)
    assert TableCosts(loaded, graph).stage(chunk, items, links) == costs.stage(chunk, items, links)
    assert isinstance(costs.stage(chunk, items, links), StageCost)
    (tmp_path / "broken.json").write_text('{"fingerprint": 1}')
    with pytest.raises(ValueError, match=r"broken\.json is not a calibration table"):
        load_table(tmp_path / "broken.json")


def test_the_error_is_weighted_by_time(graph, costs):
    error = fit_error(costs.table, graph)
    assert 0 <= error.overall <= error.worst
    assert error.worst_kind in costs.table.layers


def test_variants_tell_circumstances_apart():
    frozen = variants(make_graph(trainable="projector"))
    assert frozen["vision.layers.0"].name.endswith("no backward; frozen")
    assert not frozen["vision.layers.0"].backward
    assert frozen["vision.after"].needs_grad == () and frozen["vision.after"].backward
    whole = variants(make_graph())
    assert whole["vision.layers.0"].name == whole["vision.layers.2"].name
    assert whole["vision.after"].outputs == ("features",)
    assert whole["vision.before"].needs_grad == ()
    assert whole["language.before"].needs_grad == ("vision",)
    assert whole["language.after"].loss and whole["language.after"].outputs == ()


@pytest.mark.gpu
def test_layers_are_profiled_on_a_gpu(graph, batches, load):
    layers, stage = profile_layers(
        graph,
        batches,
        load,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        barrier=lambda: None,
        seconds_per_variant=0.05,
    )
    table = merge([Profile(layers=layers, stage=stage)], fingerprint="f", source="a profile", dtype="bfloat16")
    costs = TableCosts(table, graph)
    cost = costs.stage(chunk_of("language", 0, 3), *draw_part(batches, "language", 1))
    assert min(cost.forward_ns, cost.backward_ns, cost.saved_bytes, cost.backward_workspace_bytes) > 0
