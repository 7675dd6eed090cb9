"""The quantised copy on a GPU: its product, and that a timing decides whether there is a copy."""

import types
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bubblespec.config import Config, ModelConfig, QuantizedConfig, SpeculativeConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import graphs
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.quantized import copy as products
from bubblespec.mechanisms.quantized import mechanism
from bubblespec.memory import estimate
from tests.helpers.clocks import Clock
from tests.helpers.models import random_model, small_config

ON_GPU = ModelConfig(path="none", device="cuda", dtype="bfloat16")


@pytest.fixture
def model():
    made = random_model(small_config("qwen2"), torch.float32)
    prepare_model(made, 64)
    return made


def config_of(planning: str = "auto") -> Config:
    speculative = SpeculativeConfig(planning=planning)
    return Config(model=ON_GPU, quantized=QuantizedConfig(bits=4), speculative=speculative)


def test_int4_product_takes_and_gives_bfloat16():
    """On tensors without values, as no CPU has this product."""
    with FakeTensorMode():
        weight = torch.zeros(64, 2 * products.GROUP, dtype=torch.bfloat16)
        packed = products.INT4.pack(weight, torch.ones(weight.shape[1]))
        out = products.INT4.multiply(weight.new_zeros(2, 3, weight.shape[1]), packed)
        assert out.shape == (2, 3, 64) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("speedup, planning", [(1.34, "auto"), (1.36, "auto"), (0.2, "always")])
def test_timing_decides_before_a_copy_is_built(monkeypatch, capfd, model, speedup, planning):
    monkeypatch.setattr(mechanism, "product_speedup", lambda product, of: speedup)
    monkeypatch.setattr(mechanism, "product_for", lambda *given: products.INT4)
    config, ranks = config_of(planning), Ranks(torch.device("cpu"))
    ranks.device = torch.device("cuda")
    run = Run(config, ranks, model)
    mechanism.prepare(run)
    needs, product = mechanism.add_needs(estimate(config, model, 1), run), run.own["quantized"]
    line = "no quantised copy drafts: a product in int4 is 1.34 times as fast as the policy's, and "
    line += "pays from 1.35 on"
    assert (line in capfd.readouterr().err) == (speedup == 1.34)
    assert (product is None) == (not needs.others) == (speedup == 1.34)


def test_failing_product_on_any_rank_is_given_up(monkeypatch, capfd, model):
    def fail(product, of):
        raise RuntimeError("no kernel image\nis available")

    class Two(Ranks):
        def all_gather(self, array):
            return torch.cat((torch.tensor([3.0]), torch.from_numpy(array))).numpy()

    monkeypatch.setattr(mechanism, "product_for", lambda *given: products.INT4)
    monkeypatch.setattr(mechanism, "product_speedup", fail)
    ranks = Two(torch.device("cpu"))
    ranks.device = torch.device("cuda")
    run = Run(config_of(), ranks, model)
    mechanism.prepare(run)
    assert run.own["quantized"] is None
    err = capfd.readouterr().err
    assert "no quantised copy drafts: RuntimeError: no kernel image is available" in err


def test_products_are_compared_on_weights_beyond_caches(monkeypatch, model):
    """The largest layer but for the head; each product takes a second of its own clock."""
    clock, seen = Clock(), {"policy": set(), "copy": set()}

    def linear(x, weight):
        seen["policy"].add(weight.data_ptr())
        clock.sleep(3.0)
        return x @ weight.T

    def multiply(x, packed):
        seen["copy"].add(packed[0].data_ptr())
        clock.sleep(1.0)
        return x @ packed[0].T

    monkeypatch.setattr(graphs, "rehearse", lambda run: run())
    monkeypatch.setattr(graphs, "capture", lambda run: run)
    monkeypatch.setattr(mechanism, "median_s", partial(mechanism.median_s, clock=clock))
    monkeypatch.setattr(mechanism, "linear", linear)
    largest = max(
        layer.weight.numel()
        for layer in model.model.layers[0].mlp.children()
        if isinstance(layer, torch.nn.Linear)
    )
    monkeypatch.setattr(mechanism, "CACHE_BYTES", 4 * 4 * largest)
    product = types.SimpleNamespace(
        name="half", bits=8, fits=lambda k, m: True, pack=lambda w, f: (w * f,), multiply=multiply
    )
    assert mechanism.product_speedup(product, model) == pytest.approx(3.0, rel=1e-3)
    assert (len(seen["policy"]), len(seen["copy"])) == (6, 10)
