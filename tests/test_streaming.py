"""Streamed gradients against the same update without: one gradient in float64, whatever was
computed before the update began."""

import copy

import numpy as np
import pytest
import torch
from test_lora import adapt
from test_update import (
    GENERATIONS,
    NUM_PROMPTS,
    gradient,
    gradients,
    make_config,
    make_learner,
    make_samples,
    moved,
    teacher_of,
)

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.mechanisms.stream_gradients import StreamedGradients, pieces_of
from bubblespec.planner.batches import MicrobatchCost
from bubblespec.records import Samples
from bubblespec.types import Row
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import with_observations

# Streamed gradients are scaled behind the backward pass, others before it. In the model's own
# precision that is the same.
pytestmark = pytest.mark.usefixtures("exact_norms")

REWARDS = np.random.default_rng(3).integers(0, 3, (NUM_PROMPTS, GENERATIONS)).astype(float)
REWARDS[1] = 1.0  # nothing to learn from this group
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
CASES = {
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo"},
    "gspo": {"loss_type": "grpo", **SEQUENCE},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "rloo": {"advantage_estimator": "rloo"},
    "kl": {"loss_type": "grpo", "kl_coef": 0.3, "kl_estimator": "k2"},
    "distillation": {"loss_type": "distillation", "distillation_beta": 0.5},
    "masked": {"mask_truncated_completions": True},
    "masked grpo": {"mask_truncated_completions": True, "loss_type": "grpo"},
}


def advantages_of(rewards: np.ndarray, config) -> np.ndarray:
    loss = config.loss
    return estimate_advantages(rewards, loss.advantage_estimator, loss.scale_rewards).ravel()


def row_of(samples: Samples, i: int) -> Row:
    finish = "length" if samples.is_truncated[i] else "stop"
    fields = {"tokens": samples.tokens[i].astype(np.int64), "finish": finish}
    prompt, logprob = samples.prompt_of(i).token_ids, samples.logprob[i]
    return Row(samples.ids[i], prompt, 20, logprob=logprob, **fields)


def stream_groups(streamed: StreamedGradients, samples: Samples, groups) -> None:
    """What a rank does while it waits: the samples of these groups, two in a slice."""
    for group in groups:
        rows = [row_of(samples, group * GENERATIONS + number) for number in range(GENERATIONS)]
        pieces = pieces_of(streamed.learner, rows, REWARDS[group])
        for first in range(0, len(pieces), 2):
            chosen = pieces[first : first + 2]
            advantages = np.array([piece.advantage for piece in chosen])
            streamed.add([piece.row for piece in chosen], advantages)


def prepared(make_model, with_adapter=False):
    model = adapt(make_model()) if with_adapter else make_model()
    prepare_model(model, 64)
    return model


def reference_of(model, config):
    if not config.loss.kl_coef:
        return None
    return model if hasattr(model, "peft_config") else moved(model)


@pytest.mark.parametrize(
    "groups, with_adapter, has_turns",
    [([3, 0], True, False), ([0, 1, 2, 3], False, False), ([3, 0], False, True)],
)
@pytest.mark.parametrize("case", CASES)
def test_gradient_and_metrics_equal_without_streaming(
    make_model, case, groups, with_adapter, has_turns
):
    config = make_config(**CASES[case])
    samples = with_observations(make_samples()) if has_turns else make_samples()
    config.environment.tools = ["my.tool"] * has_turns
    advantages = advantages_of(REWARDS, config)
    plain = prepared(make_model, with_adapter)
    teacher = teacher_of(make_model, config)
    wanted, wanted_metrics = gradient(
        plain, samples, config, advantages, reference=reference_of(plain, config), teacher=teacher
    )
    model = prepared(make_model, with_adapter)
    learner = make_learner(model, config, reference=reference_of(model, config), teacher=teacher)
    streamed = StreamedGradients(learner)
    stream_groups(streamed, samples, groups)
    num_streamed = len(streamed.ids)
    empty = {samples.ids[i] for i in np.flatnonzero(samples.num_sampled == 0)}
    assert num_streamed >= 3 and streamed.ids.isdisjoint(empty) and bool(empty) == has_turns
    seen, metrics = gradients(learner, samples, advantages)
    assert (seen[0] - wanted).norm() <= 1e-12 * wanted.norm() > 0
    assert streamed.is_covered.sum() == num_streamed
    for name in metrics.keys() - {"timing_s/sync"}:
        assert metrics[name] == pytest.approx(wanted_metrics[name], rel=1e-9, abs=1e-12), name
    assert metrics.keys() == wanted_metrics.keys()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # Adam divides small gradients by themselves
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    assert not streamed.ids and not learner.optimizer.flat_grad.any()
    assert streamed.cost.is_known and streamed.cost.seconds(10) > 0


def test_samples_streamed_twice_or_not_trained_on_are_refused(make_model):
    samples, learner = make_samples(), make_learner(prepared(make_model), make_config())
    streamed = StreamedGradients(learner)
    stream_groups(streamed, samples, [0])
    rows = [row_of(samples, place) for place in range(GENERATIONS)]
    with pytest.raises(ValueError, match="computed before"):
        streamed.add(rows[:1], np.ones(1))
    with pytest.raises(ValueError, match="not trained on"):
        learner.update(samples.of_groups([1, 2]), advantages_of(REWARDS[1:3], learner.config), 0)


def streamed_on_two_ranks(ranks: Ranks, model, shard_state: bool) -> dict:
    """Each rank streams some groups of its own; two updates with and without."""
    seen, weights, shares = {}, {}, []
    for streams in (False, True):
        own, config = copy.deepcopy(model), make_config(loss_type="grpo")
        prepare_model(own, 64)
        config.optim.shard_state = shard_state
        learner, advantages = make_learner(own, config, ranks=ranks), advantages_of(REWARDS, config)
        streamed = StreamedGradients(learner)
        for step in range(2):
            samples = make_samples(step)
            if streams:
                groups = [0, 2, 3][step:]
                stream_groups(streamed, samples, groups[ranks.rank :: 2])
            (gradient,), _ = gradients(learner, samples, advantages)
            seen[streams, step] = gradient
            shares.append(
                streamed.is_covered.sum() / learner.has_gradient(samples, advantages).sum()
            )
        weights[streams] = torch.cat([p.detach().flatten() for p in own.parameters()])
    pairs = [(seen[True, step], seen[False, step]) for step in range(2)]
    return {
        "differences": [float((ours - wanted).norm() / wanted.norm()) for ours, wanted in pairs],
        "weights": float((weights[True] - weights[False]).abs().max()),
        "shares": shares[2:],
    }


def test_two_ranks_stream_groups(make_model, tmp_path):
    for result in run_ranks(tmp_path, streamed_on_two_ranks, 2, make_model(), True):
        first, second = result["differences"]
        assert first < 1e-12 and second < 1e-7 and result["weights"] < 1e-7
        assert result["shares"][0] == 1 and 0.2 < result["shares"][1] < 1


# What a slice takes


def test_microbatch_cost_is_learned():
    cost = MicrobatchCost()
    assert not cost.is_known
    cost.observe(2, 200, 1.0)
    # by the token, while only one size is known
    assert cost.seconds(100) == pytest.approx(0.5) and cost.max_tokens(0.25) == 50
    cost = MicrobatchCost()
    rng = np.random.default_rng(0)
    for _ in range(20):
        num_batches, num_tokens = int(rng.integers(1, 5)), int(rng.integers(10, 400))
        cost.observe(num_batches, num_tokens, 0.01 * num_batches + 1e-3 * num_tokens)
    assert cost.seconds(100) == pytest.approx(0.11) and cost.tokens_s(100) == pytest.approx(0.1)
    assert cost.max_tokens(0.1) in (89, 90) and cost.max_tokens(0.005) == 0
    for _ in range(60):
        cost.observe(1, 100, 0.2)
        cost.observe(1, 50, 0.1)
    assert cost.seconds(100) == pytest.approx(0.2, rel=0.02), "the latest count most"
