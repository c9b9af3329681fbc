"""Packed attention against attention written out, sequence by sequence."""

import math
import random

import pytest
import torch

from pipeweaver.model import attention
from pipeweaver.model.attention import attend, positions, rotary, rotate


def written_out(q, k, v, lengths, key_lengths, causal):
    """softmax(q k^T / sqrt(d)) v, one sequence and head at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    row = key_row = 0
    for length, key_length in zip(lengths, key_lengths, strict=True):
        for head in range(q.shape[1] if key_length else 0):
            keys = k[key_row : key_row + key_length, head // group]
            scores = q[row : row + length, head] @ keys.T / q.shape[2] ** 0.5
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
            out[row : row + length, head] = scores.softmax(-1) @ v[key_row : key_row + key_length, head // group]
        row, key_row = row + length, key_row + key_length
    return out


def heads(rows, count, dim=4):
    return torch.randn(rows, count, dim, dtype=torch.float64, requires_grad=True)


def random_cases():
    draw = random.Random(0)
    for _ in range(40):
        count = draw.randrange(6)
        lengths = [draw.choice([0, 1, 3, 3, 3, 7]) for _ in range(count)]
        causal = draw.random() < 0.5
        key_lengths = lengths if causal else [draw.choice([0, 2, 2, 5]) for _ in range(count)]
        yield lengths, key_lengths, causal, draw.choice([(1, 1), (4, 4), (4, 2), (6, 1)])


@pytest.mark.parametrize(("lengths", "key_lengths", "causal", "counts"), list(random_cases()))
def test_attention_equals_attention_written_out(lengths, key_lengths, causal, counts):
    torch.manual_seed(0)
    q = heads(sum(lengths), counts[0])
    k, v = heads(sum(key_lengths), counts[1]), heads(sum(key_lengths), counts[1])
    found = attend(q, k, v, lengths, key_lengths, causal=causal)
    expected = written_out(q, k, v, lengths, key_lengths, causal)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    if expected.requires_grad and found.requires_grad:
        ours = torch.autograd.grad((found * weights).sum(), [q, k, v], allow_unused=True)
        theirs = torch.autograd.grad((expected * weights).sum(), [q, k, v], allow_unused=True)
        for tensor, mine, other in zip([q, k, v], ours, theirs, strict=True):
            zero = torch.zeros_like(tensor)
            torch.testing.assert_close(zero if mine is None else mine, zero if other is None else other)


def test_a_sequence_sees_no_other():
    q, k, v = heads(8, 2), heads(8, 2), heads(8, 2)
    before = attend(q, k, v, [3, 5])
    with torch.no_grad():
        k[:3] += 1
        v[:3] += 1
    after = attend(q, k, v, [3, 5])
    assert torch.equal(before[3:], after[3:])
    assert not torch.equal(before[:3], after[:3])


def test_causal_rows_see_nothing_later():
    q, k, v = heads(5, 2), heads(5, 2), heads(5, 2)
    (gradient,) = torch.autograd.grad(attend(q, k, v, [5], causal=True)[2].sum(), [k])
    assert gradient[:3].abs().sum() > 0 and torch.equal(gradient[3:], torch.zeros_like(gradient[3:]))


def test_attention_gradients_by_differences():
    q, k, v = heads(5, 2, 2), heads(5, 1, 2), heads(5, 1, 2)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, [2, 3], causal=True), (q, k, v))


def test_the_variable_length_kernel_gets_what_it_asks_for(monkeypatch):
    """On a GPU in half precision one kernel takes all sequences; here a stand-in with the same arguments."""

    def kernel(q, k, v, starts, key_starts, longest, longest_key, *, window_size, enable_gqa):
        assert starts.dtype == key_starts.dtype == torch.int32
        assert (longest, longest_key) == (starts.diff().max(), key_starts.diff().max())
        assert enable_gqa == (q.shape[1] != k.shape[1])
        assert window_size in ((-1, 0), (-1, -1))
        lengths, key_lengths = starts.diff().tolist(), key_starts.diff().tolist()
        return written_out(q, k, v, lengths, key_lengths, window_size == (-1, 0))

    q, k, v = heads(7, 4), heads(9, 2), heads(9, 2)
    found = attention._attend_packed(kernel, q, k, v, [3, 0, 4], [2, 2, 5], False)
    torch.testing.assert_close(found, attend(q, k, v, [3, 0, 4], [2, 2, 5]))
    q, k, v = heads(7, 4), heads(7, 4), heads(7, 4)
    found = attention._attend_packed(kernel, q, k, v, [3, 4], [3, 4], True)
    torch.testing.assert_close(found, attend(q, k, v, [3, 4], causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_a_gpu(dtype, causal):
    lengths = [64, 1, 0, 130, 64, 64]
    key_lengths = lengths if causal else [8, 0, 3, 130, 64, 64]
    torch.manual_seed(0)
    q = torch.randn(sum(lengths), 8, 64, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(sum(key_lengths), 2, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    weights = torch.randn(q.shape, dtype=dtype)
    results = []
    for device, cast in (("cpu", torch.float64), ("cuda", dtype)):
        inputs = [t.detach().to(device, cast).requires_grad_() for t in (q, k, v)]
        out = attend(*inputs, lengths, key_lengths, causal=causal)
        gradients = torch.autograd.grad((out * weights.to(device, cast)).sum(), inputs)
        results.append([t.cpu().double() for t in (out, *gradients)])
    close = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=3e-2, atol=3e-2)
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **close)


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = torch.randn(1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 8, dtype=torch.float64)

    def score(*coordinates):
        cosines, sines = rotary([torch.tensor(c) for c in coordinates], 8, 10_000.0, torch.float64)
        first, second = (rotate(x.expand(2, -1, -1), cosines, sines) for x in (q, k))
        return first[0, 0] @ second[1, 0]

    torch.testing.assert_close(score([3, 5]), score([103, 105]))
    torch.testing.assert_close(score([3, 5], [7, 2]), score([13, 15], [27, 22]))
    assert abs(score([3, 5]) - score([3, 6])) > 1e-6
    assert abs(score([3, 5], [7, 2]) - score([3, 5], [7, 3])) > 1e-6


def test_far_positions_are_exact():
    cosines, _ = rotary([torch.tensor([2**20])], 4, 10_000.0, torch.float32)
    assert float(cosines[0, 0, 0]) == pytest.approx(math.cos(2**20), abs=1e-6)


def test_frequencies_are_shared_out_over_the_axes():
    cosines, _ = rotary([torch.tensor([1]), torch.tensor([0]), torch.tensor([0])], 10, 100.0, torch.float64)
    assert cosines.shape == (1, 1, 5)
    assert (cosines[0, 0] < 1).tolist() == [True, True, False, False, False]


def test_positions_start_anew_in_each_sequence():
    assert positions([3, 0, 2], torch.device("cpu")).tolist() == [0, 1, 2, 0, 1]
    assert positions([], torch.device("cpu")).tolist() == []
