"""The quantised copy on CUDA tensors without values (helpers/fake_cuda.py)."""

import numpy as np
import pytest
import torch
from test_fake_cuda import PARAMS

from bubblespec.engine.engine import Engine
from bubblespec.engine.packing import PAGE
from bubblespec.mechanisms.quantized import products
from bubblespec.mechanisms.quantized.copy import Copy, observe_inputs
from bubblespec.mechanisms.quantized.runner import CopyRunner
from tests.helpers.fake_cuda import DEVICE, make_fake
from tests.helpers.generation import make_runner


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("params", PARAMS)
def test_quantised_copy_waits_once_for_each_token(cuda, monkeypatch, kernel, bits, params):
    """Its products, its drawing and its renewal; never run on a GPU."""
    monkeypatch.setattr(products, "GROUP", 32)  # as small as the model
    monkeypatch.setattr(products, "INNER_TILES", 2)
    model = make_fake("llama")
    product = products.product_for(model, "cuda", bits)
    tokens = torch.zeros(60, dtype=torch.int64, device=DEVICE)
    copy = Copy(model, product, *observe_inputs(model, tokens, kernel))
    assert [len(part.layers) for part in copy.parts[:4]] == [3, 1, 2, 1]
    engine = Engine(make_runner(model, 4, 2 * PAGE, 0, kernel=kernel, enforce_eager=True))
    runner = CopyRunner(copy, engine, params)
    place = np.array([0, 2]), np.array([9, 30]), np.array([7, 8]), np.array([4, 5])
    runner.draw(*place)
    packed = [part.packed for part in copy.parts]
    copy.note_update()
    cuda.clear()
    copy.renew(iter(range(1000)).__next__, 1e9)
    assert all(part.packed is old for part, old in zip(copy.parts, packed, strict=True))
    assert cuda.waits == []
    found, lead = runner.draw(*place)
    assert found.shape == lead.shape == (2,) and found.dtype == np.int64
    assert cuda.waits == ["packing.to_host"] and cuda.products <= {torch.bfloat16}
