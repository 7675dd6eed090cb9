"""Gradients and metrics of updates against the sums that the papers write, in float64, one sequence
at a time; with episodes, where an environment's tokens are fed, and in no loss, mean or metric."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_streaming import reference_of
from test_update import (
    ADVANTAGES,
    GENERATIONS,
    make_config,
    make_learner,
    make_samples,
    moved,
    responses_of,
    teacher_of,
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bubblespec.engine.model_checks import prepare_model
from bubblespec.records import digest
from bubblespec.rollout.sampler import gather_samples
from bubblespec.rollout.table import RolloutProgress
from bubblespec.tools.simulate.world import SimulatedRanks, World
from tests.helpers.reference_step import (
    jensen_shannon,
    kl_estimate,
    log_distributions,
    mean_loss,
    token_logprobs,
    token_losses,
)
from tests.helpers.rows import launch_of, with_observations

SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}
FEW = {"top_k": 9, "top_p": 0.8, "min_completion_length": 4, "stop_token_ids": [3, 5]}
CASES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dual clip": {"loss_type": "dapo", "delta": 1.25},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "gspo": {"loss_type": "grpo", **SEQUENCE},
    "gspo averaged over tokens": {"loss_type": "dapo", **SEQUENCE},
    "kl": {"loss_type": "grpo", "kl_coef": 0.3},
    "distillation": {"loss_type": "distillation"},
    "distillation of what is likely": {"loss_type": "distillation", "distillation_beta": 0.0},
    "distillation truncated": {
        "loss_type": "distillation",
        "distillation_beta": 0.3,
        "mask_truncated_completions": True,
    },
    "distillation and rewards": {"loss_type": "grpo", "kl_coef": 0.3, "distillation_coef": 0.7},
    "truncated masked": {"loss_type": "dapo", "mask_truncated_completions": True},
    "of few tokens": {"loss_type": "grpo", "kl_coef": 0.3, "distillation_coef": 0.7, **FEW},
    "few tokens distilled": {"loss_type": "distillation", "distillation_beta": 0.3, **FEW},
    "truncated masked grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
}


def updates(make_model, config, samples, num_ranks: int):
    """Gradient and weights before it of each update of a step, on threads as ranks; and metrics."""
    world, results, models = World(num_ranks), {}, [make_model() for _ in range(num_ranks)]

    def work(rank: int) -> None:
        model, ranks, seen = models[rank], SimulatedRanks(world, rank), []
        prepare_model(model, 64)
        teacher = teacher_of(make_model, config)
        learner = make_learner(model, config, reference_of(model, config), ranks, teacher)
        optimizer, step = learner.optimizer, learner.optimizer.step

        def noting(*arguments):
            weights = parameters_to_vector(model.parameters()).detach().clone()
            seen.append((optimizer.flat_grad.clone(), weights))
            return step(*arguments)

        optimizer.step = noting
        results[rank] = seen, learner.update(samples, ADVANTAGES, 0)[0]

    world.run(work)
    for rank in range(1, num_ranks):
        for ours, others in zip(results[0][0], results[rank][0], strict=True):
            assert all(map(torch.equal, ours, others))
    return results[0]


def masked_loss(model, reference, teacher, samples, config, old: list[torch.Tensor]):
    """The loss of all samples, and values of the tokens that are trained on, by name."""
    loss, rollout, losses = config.loss, config.rollout, []
    seen = {name: [] for name in ("low", "high", "delta", "kl", "divergence", "mismatch")}
    for i, response in enumerate(responses_of(samples)):
        generated = torch.from_numpy(samples.logprob[i])
        sampled = ~generated.isnan()
        is_masked = samples.is_truncated[i] and loss.mask_truncated_completions
        if is_masked or not sampled.any():
            continue
        logprob, other = token_logprobs(model, response, rollout)[sampled], None
        if reference is not None:
            other = token_logprobs(reference, response, rollout, model).detach()[sampled]
            seen["kl"] += kl_estimate(logprob, other, loss.kl_estimator).tolist()
        before, is_alone = old[i][sampled], loss.loss_type == "distillation"
        values, clips = token_losses(logprob, before, ADVANTAGES[i], loss, other)
        if teacher is not None:
            own = log_distributions(model, response, rollout)
            theirs = log_distributions(teacher, response, rollout, model)
            divergence = jensen_shannon(theirs.detach(), own, loss.distillation_beta)[sampled]
            values = divergence if is_alone else values + loss.distillation_coef * divergence
            seen["divergence"] += divergence.tolist()
        losses.append(values)
        for name in ("low", "high", "delta"):
            seen[name] += clips.get(name, torch.zeros(len(values))).tolist()
        seen["mismatch"] += (before - generated[sampled]).abs().tolist()
    limit = config.rollout.max_completion_length
    return mean_loss(losses, len(samples), loss.loss_type, limit), seen


@pytest.mark.parametrize(
    "has_turns, num_ranks, num_updates", [(False, 2, 2), (True, 1, 2), (True, 2, 1)]
)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("exact_norms")
def test_gradients_and_metrics_equal_masked_sums(
    make_model, case, has_turns, num_ranks, num_updates
):
    samples = with_observations(make_samples()) if has_turns else make_samples()
    found = [values + (-1) ** i + 50 * (i == 2) for i, values in enumerate(samples.logprob)]
    samples = replace(samples, logprob=found)  # far off, furthest in a truncated sample
    assert samples.is_truncated[2]
    loss = {name: value for name, value in CASES[case].items() if name not in FEW}
    config = make_config(**loss, num_iterations=num_updates)
    if len(loss) < len(CASES[case]):
        config.rollout = replace(config.rollout, **FEW)
    config.optim.learning_rate = 0.02
    if has_turns:
        num_sampled = samples.num_sampled
        assert (num_sampled == 0).any() and (num_sampled == samples.lengths).any()
        config.environment.tools = ["my.tool"]
    seen, metrics = updates(make_model, config, samples, num_ranks)
    plain = make_model()
    plain.set_attn_implementation("sdpa")
    reference = moved(plain) if config.loss.kl_coef else None
    teacher = teacher_of(make_model, config) and make_model("gpt2")
    with torch.no_grad():
        old = [
            token_logprobs(plain, response, config.rollout) for response in responses_of(samples)
        ]
    losses, values = [], {}
    for gradient, weights in seen:
        vector_to_parameters(weights, plain.parameters())
        plain.zero_grad()
        loss, by_name = masked_loss(plain, reference, teacher, samples, config, old)
        loss.backward()
        wanted = torch.cat([p.grad.flatten() for p in plain.parameters()])
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)
        losses.append(loss.item())
        values = {name: values.get(name, []) + by_name[name] for name in by_name}
    mean = {name: np.mean(values[name]) for name in values if values[name]}
    wanted = {
        "loss": np.mean(losses),
        "grad_norm": np.mean([gradient.norm().item() for gradient, _ in seen]),
        "learning_rate": 0.02,
        "skipped_updates": 0,
        "sampling/logp_difference/mean": mean["mismatch"],
        "sampling/logp_difference/max": max(values["mismatch"]),
    }
    if reference is not None:
        wanted["kl"] = mean["kl"]
    if teacher is not None:
        wanted["divergence"] = mean["divergence"]
    if num_updates > 1 and config.loss.loss_type != "distillation":
        low, high = mean["low"], mean["high"]
        clips = {"low_mean": low, "high_mean": high, "region_mean": low + high}
        if config.loss.delta is not None:
            clips["delta_mean"] = mean["delta"]
        assert low + high > 0.02 and clips.get("delta_mean", 1) > 0
        wanted |= {f"clip_ratio/{name}": value for name, value in clips.items()}
    metrics.pop("timing_s/sync")
    assert len(seen) == num_updates and metrics == pytest.approx(wanted, rel=1e-8, abs=1e-10)


def test_mask_travels_with_log_probabilities():
    samples = with_observations(make_samples())
    launch, world, results = launch_of(samples.groups, GENERATIONS), World(2), {}
    rank_of = np.arange(len(samples)) % 2

    def work(rank: int) -> None:
        ranks, table = SimulatedRanks(world, rank), RolloutProgress(launch, rank_of, rank)
        rows = table.make_rows(20)
        for index, row in rows.items():
            row.tokens, row.finish = samples.tokens[index].astype(np.int64), "stop"
            row.logprob = samples.logprob[index]
            table.note(index, len(row.tokens), True)
        results[rank] = gather_samples(rows, np.zeros((len(rows), 1)), table, ranks)

    world.run(work)
    for found in results.values():
        assert digest(found) == digest(samples)
        for ours, wanted in zip(found.logprob, samples.logprob, strict=True):
            np.testing.assert_array_equal(ours, wanted)
            assert ours.dtype == np.float32
