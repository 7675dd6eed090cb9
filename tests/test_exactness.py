"""Rows pre-empted and drafts spoilt at random: the same tokens and weights. A short version of
tests/system/exactness.py."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bubblespec.config import Config, load_config
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.noise import gumbel
from bubblespec.engine.sampling import SamplingParams
from bubblespec.setup import build
from bubblespec.types import Draft, Row, SampleId
from tests.system.disturbed_train import Disturbance, corrupt_drafts
from tests.system.exactness import (
    ALWAYS_PROPOSE,
    FEW_SLOTS,
    SAMPLING,
    SHORT,
    first_difference,
    largest_change,
    read_metrics,
    read_weights,
    same_weights,
)
from tests.system.near_ties import NOISE, NUCLEUS, VIOLATION, NearTies, judge
from tests.system.near_ties import first_difference as first_different_token
from train import train

STEPS = 4


def run(
    folder, sampling: str, *overrides: str, preempt: float = 0.0, corrupt: float = 0.0
) -> Disturbance:
    options = [
        *SHORT,
        *SAMPLING[sampling],
        "data.size=24",
        "rollout.max_completion_length=48",
        f"run.output_dir={folder}",
    ]
    options += [f"run.max_steps={STEPS}", "run.save_steps=1", *overrides]
    config = load_config("configs/tiny_cpu_bulk.yaml", options)
    trainer = build(config, Ranks(torch.device("cpu")))
    disturbance = Disturbance(trainer, preempt, corrupt)
    train(trainer)
    trainer.lock.close()
    return disturbance


@pytest.fixture(scope="module", params=SAMPLING)
def reference(request, tmp_path_factory):
    """Sampling setting and folder of a plain run, which the disturbed runs are compared with."""
    folder = tmp_path_factory.mktemp("reference")
    run(folder, request.param)
    assert largest_change(read_weights(folder, 1), read_weights(folder, STEPS)) > 1e-6, (
        "the policy must have learned something"
    )
    return request.param, folder


@pytest.mark.parametrize(
    "preempt, corrupt, overrides",
    [
        (0.2, 0.0, ("speculative.method=none", *FEW_SLOTS)),
        (
            0.3,
            0.0,
            (
                "speculative.method=bubble+suffix",
                *ALWAYS_PROPOSE,
                "rollout.num_slots=20",
                "rollout.max_batch_tokens=80",
            ),
        ),
        (0.0, 0.5, ("speculative.method=bubble+suffix", *ALWAYS_PROPOSE)),
    ],
)
def test_disturbances_leave_tokens_and_weights_unchanged(
    reference, tmp_path, preempt, corrupt, overrides
):
    sampling, folder = reference
    counts = run(tmp_path, sampling, *overrides, preempt=preempt, corrupt=corrupt).counts
    assert len(read_metrics(tmp_path)) == STEPS
    assert first_difference(read_metrics(tmp_path), read_metrics(folder)) is None
    assert same_weights(read_weights(tmp_path, STEPS), read_weights(folder, STEPS))
    # They must have had something to disturb.
    speculates = "speculative.method=none" not in overrides
    assert (counts["own rows pre-empted"] > 20) == (preempt > 0)
    assert (counts["draft rows pre-empted"] > 0) == (preempt > 0 and speculates)
    assert (counts["drafts corrupted"] > 0) == (counts["proposals corrupted"] > 50) == (corrupt > 0)
    if speculates:
        assert (
            sum(line["rollout/spec_accept_length"] for line in read_metrics(tmp_path)) > 1.1 * STEPS
        )


def test_corrupted_drafts_are_what_a_store_may_hold():
    rng = np.random.default_rng(0)
    ids = [SampleId(uid, 2, sample) for uid in range(20) for sample in range(4)]
    drafts = {
        key: Draft(np.arange(key.uid + key.sample, dtype=np.int32), key.uid % 2 == 0, 1)
        for key in ids
    }
    result, count = corrupt_drafts(drafts, rng, 1.0, vocab_size=50, max_new_tokens=12)
    assert count == 80 and result.keys() == drafts.keys()
    assert all(d.tokens.dtype == np.int32 and (d.tokens < 50).all() for d in result.values())
    assert all(d.is_finished or len(d.tokens) < 12 for d in result.values())
    changed = [k for k, d in result.items() if not np.array_equal(d.tokens, drafts[k].tokens)]
    assert len(changed) > 50 and any(result[k].is_finished != drafts[k].is_finished for k in drafts)
    assert all(
        np.array_equal(d.tokens, np.arange(key.uid + key.sample)) for key, d in drafts.items()
    ), "the given ones are kept"


# First differences in float32


def test_first_different_token():
    a = np.array([4, 5, 6])
    assert first_different_token(a, a.copy()) is None
    assert first_different_token(a, np.array([4, 7, 6])) == 1
    assert first_different_token(a, np.array([4, 5])) == 2


def test_a_first_difference_is_a_near_tie_or_a_violation():
    """Logits made so that tokens 3 and 8 lead after temperature and noise, by a gap that is
    known."""
    key, params = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32), SamplingParams(temperature=0.7)
    noise = gumbel(key, 20, torch.float64)[0]
    perturbed = torch.zeros(20, dtype=torch.float64)
    perturbed[3], perturbed[8] = 5.0, 5.0 - 4e-4
    logits = (perturbed - noise) * 0.7
    kind, gap = judge(logits, key, 0, params, {3, 8})
    assert kind == NOISE and gap == pytest.approx(4e-4)
    assert judge(logits, key, 0, params, {3, 9})[0] == VIOLATION
    assert judge(logits, key, 0, params, {3})[0] == VIOLATION
    perturbed[8] = 4.99
    assert judge((perturbed - noise) * 0.7, key, 0, params, {3, 8})[0] == VIOLATION


def test_a_token_at_the_edge_of_the_nucleus_may_be_in_or_out():
    """Of two tokens the less probable one has the better noise, and wins by far if it is in the
    nucleus at all."""
    key = torch.tensor([[5, 6, 7, 8]], dtype=torch.int32)
    noise = gumbel(key, 20, torch.float64)[0]
    second, winner = noise.argsort()[[0, -1]].tolist()
    probability = torch.full((20,), 1e-9, dtype=torch.float64)
    probability[second], probability[winner] = 0.55, 0.45
    logits, before = probability.log(), float((probability / probability.sum())[second])
    for distance in (5e-5, -5e-5):
        kind, gap = judge(logits, key, 0, SamplingParams(top_p=before + distance), {winner, second})
        assert kind == NUCLEUS and gap == pytest.approx(5e-5, rel=1e-3)
    assert (
        judge(logits, key, 0, SamplingParams(top_p=before + 2e-3), {winner, second})[0] == VIOLATION
    )
    assert judge(logits, key, 0, SamplingParams(), {winner, second})[0] == VIOLATION


def test_a_difference_is_recorded_with_the_id_of_its_row(make_model):
    sampler, model = SimpleNamespace(params=SamplingParams()), make_model("llama")
    ties = NearTies(SimpleNamespace(config=Config(), sampler=sampler))
    ties._exact_model = lambda: model
    rows = [
        Row(SampleId(uid=5, visit=2, sample=1), prompt=(1, 2), max_new_tokens=9) for _ in range(2)
    ]
    for row, tokens in zip(rows, ([4, 5, 6], [4, 7, 6]), strict=True):
        row.tokens = np.array(tokens)
    ties.inspect(rows[:1], rows[:1])
    ties.inspect(rows[:1], rows[1:])
    assert [difference[:5] for difference in ties.differences] == [(5, 2, 1, 1, VIOLATION)]
    assert (ties.num_rows, ties.num_tokens) == (2, 3 + 2)
