"""What holds for the layers of every module: no cross-talk, nothing depends on packing, shapes without values."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeweaver.data.items import linked
from pipeweaver.model.build import build_graph, materialise_all, named_parameters
from pipeweaver.model.graph import Flow, topological
from pipeweaver.model.language import count_answers
from pipeweaver.model.part import PartView, check_outputs
from pipeweaver.model.reference import run_all
from tests.model.examples import (
    DIFFUSION,
    IMAGE,
    LANGUAGE,
    VISION,
    WRITER,
    batch,
    clip,
    document,
    image,
    latents,
    loader,
    text,
    text_diffusion,
    vision_language,
)
from tests.model.test_build import changed


def view(items, links=(), device="cpu", dtype=torch.float64, **options):
    return PartView(
        items=items,
        links=linked(tuple(items), tuple(links)) if links else [()] * len(items),
        loaded={},
        step=options.pop("step", 0),
        seed=options.pop("seed", 0),
        device=torch.device(device),
        dtype=dtype,
        **options,
    )


def in_sublayers(config):
    return changed(config, sublayers=True)


DOCUMENTS = [
    document(0, [(4, 4), (2, 4)], 6),
    document(1, [], 5),
    document(2, [(2, 2)], 7),
    document(3, [(4, 4), (4, 4), (6, 2)], 2),
]
CLIPS = [clip(0, 5, (3, 2)), clip(1, 1, (1, 1)), clip(2, 9, (2, 2))]
CASES = {
    "vision-language": (vision_language, DOCUMENTS),
    "text-diffusion": (text_diffusion, CLIPS),
    "vision-language in sublayers": (lambda: vision_language(in_sublayers(VISION), in_sublayers(LANGUAGE)), DOCUMENTS),
    "text-diffusion in sublayers": (lambda: text_diffusion(in_sublayers(DIFFUSION), in_sublayers(WRITER)), CLIPS),
    "diffusion on a grid": (lambda: text_diffusion(changed(DIFFUSION, positions="grid")), CLIPS),
    "grouped diffusion": (
        lambda: text_diffusion(changed(DIFFUSION, heads=4, kv_heads=2, cross_kv_heads=1, gated=False, bias=True)),
        CLIPS,
    ),
    "plain language": (
        lambda: build_graph(
            {"language": changed(LANGUAGE, placeholders={}, gated=False, activation="gelu", tied=True)}
        ),
        [document(i, [], words) for i, words in enumerate([3, 1, 8])],
    ),
}
each_case = pytest.mark.parametrize(("make", "documents"), CASES.values(), ids=CASES)


def outcome(graph, layers, documents, **options):
    items, links = batch(*documents)
    return run_all(graph, layers, items, links, loader(items, links), dtype=torch.float64, **options)


@each_case
def test_packing_and_order_do_not_matter(make, documents):
    graph = make()
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    losses = {}
    for order in itertools.islice(itertools.permutations(documents), 6):
        losses.update({len(losses): outcome(graph, layers, order).loss.item()})
    assert max(losses.values()) - min(losses.values()) < 1e-12 * abs(losses[0])
    units = {key: 1 for key in outcome(graph, layers, documents).losses}
    whole = outcome(graph, layers, documents, normalisers=units).loss
    alone = [outcome(graph, layers, [one], normalisers=units).loss.item() for one in documents]
    assert sum(alone) == pytest.approx(whole.item(), rel=1e-12)


def test_sublayers_are_the_halves_of_blocks():
    whole = vision_language()
    halves = vision_language(in_sublayers(VISION), in_sublayers(LANGUAGE))
    assert [len(module.layers) for module in halves.modules] == [4, 4]
    layers = materialise_all(whole, seed=0, dtype=torch.float64)
    parts = materialise_all(halves, seed=1, dtype=torch.float64)
    ours, theirs = named_parameters(halves, parts), named_parameters(whole, layers)

    def name_of(name):
        """Of the same parameter in whole blocks."""
        module, place, number, *rest = name.split(".")
        return ".".join([module, place, str(int(number) // 2), *rest]) if place == "layers" else name

    assert {name_of(name) for name in ours} == set(theirs)
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name_of(name)])
    expected, found = outcome(whole, layers, DOCUMENTS), outcome(halves, parts, DOCUMENTS)
    assert found.losses == expected.losses
    for losses in (expected.losses, found.losses):
        sum(losses.values()).backward()
    for name, parameter in ours.items():
        assert torch.equal(parameter.grad, theirs[name_of(name)].grad), name


@each_case
def test_every_parameter_learns(make, documents):
    graph = make()
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    outcome(graph, layers, documents).loss.backward()
    still = [n for n, p in named_parameters(graph, layers).items() if p.grad is None or not p.grad.any()]
    # Keys' biases shift all scores of a row alike, which a softmax does not see.
    assert [name for name in still if not name.endswith("attention.k.bias")] == []


@each_case
def test_gradients_by_differences(make, documents):
    graph = make()
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    outcome(graph, layers, documents).loss.backward()
    torch.manual_seed(0)
    direction = {n: torch.randn_like(p) for n, p in named_parameters(graph, layers).items()}
    slope = sum((p.grad * direction[n]).sum() for n, p in named_parameters(graph, layers).items())
    step, sides = 1e-6, []
    for sign in (1, -1):
        moved = materialise_all(graph, seed=0, dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in named_parameters(graph, moved).items():
                parameter += sign * step * direction[name]
        sides.append(outcome(graph, moved, documents).loss.item())
    assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(slope.item(), rel=1e-6)


@each_case
def test_recomputed_attention_is_exact_and_saves_less(make, documents):
    graph = make()
    items, links = batch(*documents)
    results = []
    for recompute in (False, True):
        layers = materialise_all(graph, seed=0, dtype=torch.float64)
        name = next(n for n in layers if n.endswith("layers.0") and n.startswith(graph.modules[-1].name))
        module = graph.by_name[name.split(".")[0]]
        own = [item for item in items if item.module == module.name]
        part = view(own, recompute_attention=recompute)
        part.links = [linked(tuple(items), tuple(links))[items.index(item)] for item in own]
        generator = torch.Generator().manual_seed(0)
        spec = module.layers[0]
        state = {"x": rows(sum(part.sizes()), spec.carries[0].width, generator)}
        for flow in spec.reads:
            state[flow] = rows(sum(part.linked_sizes("language")), 20, generator)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
            out = layers[name](state, part)["x"]
        out.square().sum().backward()
        gradients = [*(t.grad for t in state.values()), *(p.grad for p in layers[name].parameters())]
        results.append((out, gradients, sum(saved)))
    (out, gradients, much), (again, regained, little) = results
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, regained, strict=True))
    assert little < much


def rows(count, width, generator):
    return torch.randn(count, width, generator=generator, dtype=torch.float64, requires_grad=True)


@each_case
@pytest.mark.parametrize("device", ["fake", "meta"])
def test_layers_run_without_values(make, documents, device):
    """Shapes, forward and backward, on tensors that hold no data."""
    graph = make()
    items, links = batch(*documents)
    load = loader(items, links)
    contents = {}
    for module in graph.modules:
        names = {name for _, spec in module.range(0, len(module.layers)) for name in spec.loads}
        contents[module.name] = load([item for item in items if item.module == module.name], sorted(names))
    kind = "meta" if device == "meta" else "cpu"
    sources = linked(tuple(items), tuple(links))
    with torch.device("meta") if device == "meta" else FakeTensorMode():
        for module in (graph.by_name[name] for name in topological(graph)):
            own = [i for i, item in enumerate(items) if item.module == module.name]
            part = view([items[i] for i in own], device=kind, dtype=torch.float32)
            part.links = [sources[i] for i in own]
            part.loaded = {
                key: torch.empty(value.shape, dtype=value.dtype) for key, value in contents[module.name].items()
            }
            reads = {
                flow.name: torch.empty(
                    sum(part.linked_sizes(flow.source, graph.sent(flow)[1].rows)), graph.sent(flow)[1].width
                )
                for flow in graph.flows
                if flow.destination == module.name
            }
            state: dict[str, torch.Tensor] = {}
            for name, spec in module.range(0, len(module.layers)):
                layer = spec.build()
                outputs = layer(state | {key: reads[key] for key in spec.reads}, part)
                last = name.endswith("after")
                check_outputs(name, spec, outputs, part, loss=last and module.loss is not None)
                state = {tensor.name: outputs[tensor.name] for tensor in spec.carries}
            sum(tensor.sum() for tensor in outputs.values()).backward()
            assert all(p.grad is not None for p in layer.parameters())


@each_case
def test_parts_without_items_or_rows(make, documents):
    graph = make()
    layers = materialise_all(graph, seed=0)
    for module in graph.modules:
        part = view([], dtype=torch.float32)
        part.loaded = {
            "tokens": torch.empty(0, dtype=torch.int64),
            "labels": torch.empty(0, dtype=torch.int64),
            "spans": torch.empty(0, dtype=torch.int64),
            "pixels": torch.empty(0, VISION.patch_values),
            "latents": torch.empty(0, DIFFUSION.channels),
        }
        reads = {f.name: torch.empty(0, graph.sent(f)[1].width) for f in graph.flows if f.destination == module.name}
        state: dict[str, torch.Tensor] = {}
        for name, spec in module.range(0, len(module.layers)):
            state = layers[name]({**state, **{key: reads[key] for key in spec.reads}}, part)
            check_outputs(name, spec, state, part, loss=name.endswith("after") and module.loss is not None)
        if module.loss:
            assert state["loss"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_case
def test_lower_precision_stays_near(make, documents, dtype):
    graph = make()
    items, links = batch(*documents)
    losses = []
    for used in (torch.float64, dtype):
        layers = materialise_all(graph, seed=0, dtype=used)
        result = run_all(graph, layers, items, links, loader(items, links), dtype=used)
        result.loss.backward()
        losses.append(result.loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2 if dtype == torch.bfloat16 else 1e-5)


# Vision.


def features_of(items, pixels, config=VISION):
    graph = build_graph({"vision": config})
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    result = run_all(graph, layers, items, [], lambda *_: {"pixels": pixels}, dtype=torch.float64)
    return result.sent["main", "vision"]["features"]


def test_an_image_sees_no_other():
    items = [image(0, 4, 4), image(1, 2, 6)]
    pixels = torch.randn(28, VISION.patch_values, dtype=torch.float64)
    before = features_of(items, pixels)
    pixels[:16] += 1
    after = features_of(items, pixels)
    assert torch.equal(before[4:], after[4:]) and not torch.equal(before[:4], after[:4])


def test_a_feature_is_made_of_the_patches_of_its_window():
    config = changed(VISION, layers=1, projector="none", output=None)
    graph = build_graph({"vision": config})
    after = materialise_all(graph, seed=0, dtype=torch.float64)["vision.after"]
    x = torch.randn(24 + 4, config.hidden, dtype=torch.float64)
    features = after({"x": x}, view([image(0, 4, 6), image(1, 2, 2)]))["features"]
    normed = after.norm(x)
    for feature, window in [(0, [0, 1, 6, 7]), (2, [4, 5, 10, 11]), (5, [16, 17, 22, 23]), (6, [24, 25, 26, 27])]:
        assert torch.equal(features[feature], normed[window].flatten())


def test_a_transposed_image_is_another_image():
    pixels = torch.randn(8, VISION.patch_values, dtype=torch.float64)
    assert not torch.allclose(features_of([image(0, 2, 4)], pixels), features_of([image(0, 4, 2)], pixels))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(tokens=7, features=2, height=2, width=4), "main/0/vision/0: 7 tokens, but 2 x 4 patches"),
        (dict(tokens=6, features=1, height=2, width=3), "2 x 3 patches cannot be merged 2 x 2"),
        (dict(tokens=8, features=3, height=2, width=4), "3 features, but 2 x 4 patches merged 2 x 2 make 2"),
    ],
)
def test_images_whose_sizes_cannot_be(sizes, message):
    item = image(0, 2, 4)
    item = changed(item, sizes=sizes)
    with pytest.raises(ValueError, match=message):
        features_of([item], torch.zeros(sizes["tokens"], VISION.patch_values))


# Language.


def embedded(tokens, rows, items, links, readings=("vision",)):
    graph = vision_language()
    before = materialise_all(graph, seed=0, dtype=torch.float64)["language.before"]
    part = view([item for item in items if item.module == "language"])
    sources = linked(tuple(items), tuple(links))
    part.links = [sources[i] for i, item in enumerate(items) if item.module == "language"]
    part.loaded = {"tokens": torch.tensor(tokens)}
    return before({"vision": rows}, part)["x"], before.embedding.weight


def test_features_take_the_places_of_their_placeholders():
    items, links = batch(document(0, [(2, 2), (2, 4)], 2), document(1, [], 1), document(2, [(2, 2)], 1))
    tokens = [4, IMAGE, IMAGE, IMAGE, 5, 6, IMAGE, 7]
    rows = torch.randn(4, 24, dtype=torch.float64)
    x, table = embedded(tokens, rows, items, links)
    assert torch.equal(x, torch.stack([table[4], rows[0], rows[1], rows[2], table[5], table[6], rows[3], table[7]]))


def test_placeholders_that_do_not_match_name_the_item():
    items, links = batch(document(0, [(2, 2)], 2), document(1, [(2, 2)], 1))
    message = "main/0/language/0: 2 placeholders for vision, but 1 rows of features come from its linked vision items"
    with pytest.raises(ValueError, match=message):  # the total is right, the items are not
        embedded([IMAGE, IMAGE, 3, 4, 5], torch.zeros(2, 24, dtype=torch.float64), items, links)
    items, links = document(0, [], 2)
    with pytest.raises(ValueError, match="1 placeholders for vision, but 0 rows"):
        embedded([IMAGE, 3], torch.zeros(0, 24, dtype=torch.float64), items, links)


def test_answers_count_when_every_row_of_their_span_is_right():
    #                      sequence 0             | sequence 1     | 2 (empty) | sequence 3
    spans = torch.tensor([*(-1, 0, 0, -1, 1, 1, 2), *(2, 2, -1, 0), 0])
    right = torch.tensor([*(0, 1, 1, 0, 1, 0, 1), *(1, 1, 0, 0), 1]).bool()
    assert [int(n) for n in count_answers(right, spans, [7, 4, 0, 1])] == [4, 6]
    assert [int(n) for n in count_answers(right[:0], spans[:0], [])] == [0, 0]
    nothing = torch.full((3,), -1)
    assert [int(n) for n in count_answers(torch.zeros(3).bool(), nothing, [1, 2])] == [0, 0]


def test_metrics_count_supervised_rows_only():
    graph = build_graph({"language": changed(LANGUAGE, placeholders={})})
    after = materialise_all(graph, seed=0, dtype=torch.float64)["language.after"]
    part = view([text(4)])
    x = torch.randn(4, 24, dtype=torch.float64)
    best = after.head(after.norm(x)).argmax(-1)
    labels = best.clone()
    labels[1] = -100
    labels[2] = (best[2] + 1) % 20
    part.loaded = {"labels": labels, "spans": torch.tensor([0, -1, 1, 1])}
    after({"x": x}, part)
    after({"x": x}, part)  # a recomputation
    assert part.metrics == {"accuracy": (2.0, 3), "answers": (1.0, 2)}


# Diffusion.


def test_noise_and_time_belong_to_the_item():
    first, second = latents(2, 3), latents(2, 2, draw=1)
    together, alone = view([first, second]), view([second])
    assert torch.equal(together.normal("noise", 3)[6:], alone.normal("noise", 3))
    assert torch.equal(together.uniform("time")[1:], alone.uniform("time"))
    other = [view([second], step=1), view([second], seed=1), view([changed(second, draw=2)])]
    assert len({float(part.uniform("time")) for part in [alone, *other]}) == 4
    assert len({float(part.normal("noise", 3)[0, 0]) for part in [alone, *other]}) == 4


def test_draws_have_the_promised_distribution():
    part = view([latents(40, 50, draw=i) for i in range(10)])
    normal = part.normal("noise", 3)
    assert normal.shape == (20_000, 3)
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    times = view([latents(1, 1, draw=i) for i in range(2000)]).uniform("time")
    assert times.min() >= 0 and times.max() < 1 and abs(times.mean() - 0.5) < 0.03


def test_a_new_model_predicts_zero():
    """With zero initial values the loss is the square of the velocity that is asked for."""
    graph = text_diffusion(changed(DIFFUSION, zero_init=True))
    layers = materialise_all(graph, seed=0, dtype=torch.float64)
    items, links = batch(*CLIPS)
    load = loader(items, links)
    own = [item for item in items if item.module == "diffusion"]
    velocity = view(own).normal("noise", 3) - load(own, ["latents"])["latents"]
    loss = run_all(graph, layers, items, links, load, dtype=torch.float64).loss
    assert loss.item() == pytest.approx(velocity.square().mean().item(), rel=1e-12)


def test_the_model_sees_latents_on_the_way_to_noise():
    graph = text_diffusion()
    before = materialise_all(graph, seed=0, dtype=torch.float64)["diffusion.before"]
    part = view([latents(1, 2), latents(1, 1, draw=1)])
    part.loaded = {"latents": torch.randn(3, 3, dtype=torch.float64)}
    time = part.uniform("time")[[0, 0, 1], None]
    noisy = (1 - time) * part.loaded["latents"] + time * part.normal("noise", 3)
    torch.testing.assert_close(before({}, part)["x"], before.latents(noisy))


def test_a_condition_reaches_its_own_item_only():
    graph = text_diffusion()
    block = materialise_all(graph, seed=0, dtype=torch.float64)["diffusion.layers.0"]
    items, links = batch(*CLIPS)
    part = view([item for item in items if item.module == "diffusion"])
    part.links = [linked(tuple(items), tuple(links))[i] for i, item in enumerate(items) if item.module == "diffusion"]
    x = torch.randn(11, 24, dtype=torch.float64)
    words = torch.randn(15, 20, dtype=torch.float64)
    before = block({"x": x, "text": words}, part)["x"]
    words[:5] += 1
    after = block({"x": x, "text": words}, part)["x"]
    assert torch.equal(before[6:], after[6:]) and not torch.allclose(before[:6], after[:6])


def test_without_a_condition_there_is_no_cross_attention():
    graph = build_graph({"diffusion": DIFFUSION})
    assert not any("cross" in name for name in named_parameters(graph, materialise_all(graph, seed=0)))


def test_latents_whose_sizes_cannot_be():
    graph = build_graph({"diffusion": changed(DIFFUSION, positions="grid")})
    layers = materialise_all(graph, seed=0, dtype=torch.float64)

    def run(item):
        values = torch.zeros(item.sizes["tokens"], 3)
        run_all(graph, layers, [item], [], lambda *_: {"latents": values}, dtype=torch.float64)

    item = latents(2, 2)
    with pytest.raises(ValueError, match="main/0/diffusion/0: 5 tokens, but 1 x 2 x 2 latents"):
        run(changed(item, sizes=item.sizes | {"tokens": 5}))
    with pytest.raises(ValueError, match="13 elements, but 4 tokens of 3 channels"):
        run(changed(item, sizes=item.sizes | {"elements": 13}))


def test_two_conditions_are_one_too_many():
    flows = [Flow(source=n, tensor="hidden", destination="diffusion", name=n) for n in ("one", "two")]
    with pytest.raises(ValueError, match=r"takes one condition, but 2 flows lead to it: one.hidden, two.hidden"):
        build_graph({"one": WRITER, "two": WRITER, "diffusion": DIFFUSION}, flows)
