"""Batch-invariant generation: one row's logits in any company, and whole rows in any engine."""

import copy
import re

import numpy as np
import pytest
import torch

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.comparison import feed
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import best_and_sum, stream_keys
from bubblespec.errors import InputError
from bubblespec.mechanisms import Run, batch_invariant
from bubblespec.mechanisms.batch_invariant import (
    InvariantLinear,
    first_difference,
    fixed_best_and_sum,
)
from bubblespec.setup import prepare
from bubblespec.types import Row
from tests.helpers.generation import Drafts, make_prompts, make_rows, make_runner
from tests.helpers.models import VOCAB
from tests.helpers.warm import ROOT

CONFIG = f"{ROOT}/configs/tiny_cpu.yaml"
TYPES = [torch.float32, torch.bfloat16]


def small_runner(model, most: int = 40, num_slots: int = 5, length: int = 40):
    sizes = {"max_num_batched_tokens": most}
    return make_runner(model, num_slots, length, 0, batch_invariant=True, **sizes)


def invariant(make_model, dtype: torch.dtype, name: str = "llama"):
    """Create a model; skip where this processor's kernels depend on more than the shape."""
    model = make_model(name, dtype, 128)
    if difference := first_difference(small_runner(model), VOCAB):
        pytest.skip(f"this processor's products: {difference}")
    return model


def guess(row: Row, length: int) -> list[int] | None:
    return [12, 13] if (row.id.sample + length) % 3 else None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_rows_in_any_company_are_bit_identical(make_model, name, dtype):
    model, found = invariant(make_model, dtype, name), []
    for slots, options, proposer in (
        (12, {}, None),
        (2, {"max_num_batched_tokens": 5}, None),
        (7, {}, Drafts(guess)),
    ):
        runner = make_runner(model, slots, 100, 3, batch_invariant=True, **options)
        rows = Engine(runner).run(make_rows(make_prompts(4), 3, 20), SamplingParams(), proposer)
        arrays = [(row.tokens, row.logprob) for row in rows]
        found.append(b"".join(array.tobytes() for of_row in arrays for array in of_row))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("page_size", [None, 5])
def test_forward_equals_the_model_forward(make_model, page_size):
    """Within rounding, with a window and in pages too; training goes through the plain product."""
    for name in ("llama", "mistral-window"):
        model = make_model(name, max_length=128)
        plain = make_runner(copy.deepcopy(model), 3, 64, 0, page_size=page_size)
        fixed = make_runner(model, 3, 64, 0, batch_invariant=True)
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (3, 44)))
        counts = [[36, 2, 1], [3, 1, 4], [5, 41, 30]]
        with torch.inference_mode():
            got, wanted = (
                torch.cat(
                    [
                        of.forward.logits(states)
                        for _, states in feed(of.forward.hidden, of.cache, ids, counts)
                    ]
                )
                for of in (fixed, plain)
            )
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        layer = next(m for m in model.modules() if isinstance(m, InvariantLinear))
        x = torch.randn(3, layer.in_features, dtype=torch.float64, requires_grad=True)
        layer(x).sum().backward()
        assert torch.equal(x.grad, layer.weight.sum(0).expand(3, -1))


@pytest.mark.parametrize(
    "layer, what", [("lm_head", "logits"), ("model.layers.1.mlp.down_proj", "hidden states, eager")]
)
def test_dependence_of_the_largest_product_is_named(make_model, layer, what):
    """Neither 64 rows at once nor the smaller forwards show it."""
    model, most = make_model(max_length=128), 100
    runner = small_runner(model, most)
    of = model.get_submodule(layer)
    plain = of.forward
    of.forward = lambda x: plain(x) * (1 + 1e-9 * (len(x) == most))
    found = first_difference(runner, VOCAB)
    assert re.match(rf"in a forward of 100 tokens \d+% of {what} differ from those of fewer", found)


def make_invariant_run(config, model):
    run = Run(config, Ranks(torch.device("cpu")), model)
    batch_invariant.load(run)
    prepare(run, model)
    batch_invariant.prepare(run)


def test_run_with_differing_logits_is_refused(make_model, monkeypatch):
    overrides = ["model.batch_invariant=true", "rollout.max_completion_length=64"]
    config = load_config(CONFIG, overrides)
    monkeypatch.setattr(batch_invariant, "first_difference", lambda *parts: "1% of logits")
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(InputError, match=r"^model\.batch_invariant: 1% of logits$"):
        make_invariant_run(config, make_model("llama", torch.float64))
    assert batch_invariant.os.environ == batch_invariant.CUBLAS


def test_model_unlike_llama_is_refused(make_model, monkeypatch):
    overrides = ["model.batch_invariant=true", "rollout.max_completion_length=64"]
    config = load_config(CONFIG, overrides)
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(InputError, match=r"^model\.batch_invariant: .*Llama, which GPT2LMHead"):
        make_invariant_run(config, make_model("gpt2", max_length=300))


def test_fixed_sums_equal_plain_sums():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, 300, generator=generator)
    is_barred = torch.rand(100, 300, generator=generator) > 2.0 ** -(torch.arange(100) % 8)[:, None]
    logits[is_barred & (torch.arange(300) != 7)] = -torch.inf
    keys = torch.from_numpy(stream_keys(0, *np.zeros((3, 100), np.int64), np.arange(100)))
    got, wanted = fixed_best_and_sum(logits, keys), best_and_sum(logits, keys)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    torch.testing.assert_close(got[2], wanted[2], rtol=1e-5, atol=1e-5)
