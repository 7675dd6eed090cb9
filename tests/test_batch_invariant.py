"""Batch-invariant generation: one row's logits in any company, and whole rows in any engine."""

import copy

import numpy as np
import pytest
import torch

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import best_and_sum, stream_keys
from bubblespec.errors import InputError
from bubblespec.mechanisms import Run, batch_invariant
from bubblespec.mechanisms.batch_invariant import (
    InvariantLinear,
    first_difference,
    fixed_best_and_sum,
    make_invariant,
)
from bubblespec.setup import prepare
from bubblespec.types import Row
from tests.helpers.generation import Drafts, make_prompts, make_rows, make_runner
from tests.helpers.models import VOCAB
from tests.helpers.warm import ROOT

CONFIG = f"{ROOT}/configs/tiny_cpu.yaml"
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(batch_invariant, "NUM_OTHERS", (0, 2, 20))


def invariant(make_model, dtype: torch.dtype, name: str = "llama"):
    """Create a model; skip where this processor's kernels depend on more than the shape."""
    model = make_model(name, dtype, 128)
    make_invariant(model)
    runner = make_runner(model, 21, 64, 0, batch_invariant=True)
    if difference := first_difference(runner, VOCAB):
        pytest.skip(f"this processor's products: {difference}")
    return model


def guess(row: Row, length: int) -> list[int] | None:
    return [12, 13] if (row.id.sample + length) % 3 else None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_rows_in_any_company_are_bit_identical(make_model, few, name, dtype):
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
        make_invariant(model)
        fixed = make_runner(model, 3, 64, 0, batch_invariant=True)
        tokens = np.random.default_rng(0).integers(0, VOCAB, (3, batch_invariant.LENGTH))
        with torch.inference_mode():
            got, wanted = (
                batch_invariant._logits(of, tokens, [3, 5], of.forward.hidden)
                for of in (fixed, plain)
            )
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        layer = next(m for m in model.modules() if isinstance(m, InvariantLinear))
        x = torch.randn(3, layer.in_features, dtype=torch.float64, requires_grad=True)
        layer(x).sum().backward()
        assert torch.equal(x.grad, layer.weight.sum(0).expand(3, -1))


def test_dependence_on_other_rows_is_named(make_model, few):
    model = make_model(max_length=128)
    head = model.get_output_embeddings()
    plain = head.forward
    head.forward = lambda x: plain(x) * (1 + 1e-9 * len(x))
    found = first_difference(make_runner(model, 21, 64, 0, batch_invariant=True), VOCAB)
    assert found.startswith("100% of a row's logits in ") and " others differ from those" in found


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
