"""What is known by its shape leaves the same trace as what torch works out."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

from pipeweaver.semu.shapes import ShapesOnly
from pipeweaver.semu.trace import trace


@pytest.mark.parametrize("channels_last", [True, False])
def test_the_trace_of_stretched_positions_is_the_same(channels_last):
    def traced(mode):
        shape = (6, 6, 8) if channels_last else (8, 6, 6)
        positions = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        x = torch.empty(35, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)

        def run():
            table = positions.permute(2, 0, 1) if channels_last else positions
            stretched = F.interpolate(table[None], size=(5, 7), mode="bicubic")
            return {"x": x + stretched[0].permute(1, 2, 0).reshape(35, -1)}

        with mode:
            return trace(run, inputs={"x": x}, parameters={"positions": positions})

    assert traced(ShapesOnly()) == traced(nullcontext())
