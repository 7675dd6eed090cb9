"""Episodes: what an environment has added to a response is fed, and is in no loss, mean or metric.
Against the masked sums as the papers write them, in float64, one sequence at a time."""

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
)
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from bubblespec.engine.model_checks import prepare_model
from bubblespec.rollout.gather import gather_samples
from bubblespec.rollout.table import RowTable
from bubblespec.tools.simulate.world import SimulatedRanks, World
from bubblespec.types import digest
from tests.helpers.reference_step import kl_estimate, mean_loss, token_logprobs, token_losses
from tests.helpers.rows import launch_of, with_observations

SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}
CASES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "gspo": {"loss_type": "grpo", **SEQUENCE},
    "gspo averaged over tokens": {"loss_type": "dapo", **SEQUENCE},
    "kl": {"loss_type": "grpo", "kl_coef": 0.3},
    "truncated masked": {"loss_type": "dapo", "mask_truncated_completions": True},
    "truncated masked grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
}


def episodes():
    samples = with_observations(make_samples())
    num_sampled = samples.num_sampled
    assert (num_sampled == 0).any() and (num_sampled == samples.lengths).any()
    assert 0.3 < num_sampled.sum() / samples.lengths.sum() < 0.7
    return samples


def config_of(case: dict, **loss):
    config = make_config(**case, **loss)
    config.environment.tools = ["my.tool"]
    return config


def updates(make_model, config, samples, advantages, num_ranks: int):
    """Gradient and weights before it of each update of a step, on threads as ranks; and metrics."""
    world, results, models = World(num_ranks), {}, [make_model() for _ in range(num_ranks)]

    def work(rank: int) -> None:
        model, ranks, seen = models[rank], SimulatedRanks(world, rank), []
        prepare_model(model, 64)
        learner = make_learner(model, config, reference_of(model, config), ranks)
        optimizer, step = learner.optimizer, learner.optimizer.step

        def noting(*arguments):
            weights = parameters_to_vector(model.parameters()).detach().clone()
            seen.append((optimizer.flat_grad.clone(), weights))
            return step(*arguments)

        optimizer.step = noting
        results[rank] = seen, learner.update(samples, advantages, 0)[0]

    world.run(work)
    for rank in range(1, num_ranks):
        for ours, others in zip(results[0][0], results[rank][0], strict=True):
            assert all(map(torch.equal, ours, others))
    return results[0]


def masked_loss(model, reference, samples, config, old: list[torch.Tensor]):
    """The loss of all samples, and sums over the sampled tokens, as `MEASURED` has them."""
    loss, temperature, losses = config.loss, config.rollout.temperature, []
    sums = dict.fromkeys(("low", "high", "kl", "mismatch", "tokens"), 0.0)
    for i, response in enumerate(responses_of(samples)):
        generated = torch.from_numpy(samples.full_logprob[i])
        sampled = ~generated.isnan()
        is_masked = samples.is_truncated[i] and loss.mask_truncated_completions
        if is_masked or not sampled.any():
            continue
        logprob, other = token_logprobs(model, response, temperature)[sampled], None
        if reference is not None:
            other = token_logprobs(reference, response, temperature).detach()[sampled]
            sums["kl"] += kl_estimate(logprob, other, loss.kl_estimator).sum().item()
        before = old[i][sampled]
        values, clips = token_losses(logprob, before, ADVANTAGES[i], loss, other)
        losses.append(values)
        for name in ("low", "high"):
            sums[name] += int(clips[name].sum()) if name in clips else 0
        sums["mismatch"] += (before - generated[sampled]).abs().sum().item()
        sums["tokens"] += len(logprob)
    limit = config.rollout.max_completion_length
    return mean_loss(losses, len(samples), loss.loss_type, limit), sums


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("exact_norms")
def test_gradients_and_metrics_equal_masked_sums(make_model, case, num_ranks):
    """On-policy, and off it in a second pass over the batch."""
    samples, config = episodes(), config_of(CASES[case], num_iterations=2)
    config.optim.learning_rate = 0.02
    seen, metrics = updates(make_model, config, samples, ADVANTAGES, num_ranks)
    plain = make_model()
    plain.set_attn_implementation("sdpa")
    reference = moved(plain) if config.loss.kl_coef else None
    with torch.no_grad():
        responses = responses_of(samples)
        old = [token_logprobs(plain, response, 0.8) for response in responses]
    losses, totals = [], []
    for gradient, weights in seen:
        vector_to_parameters(weights, plain.parameters())
        plain.zero_grad()
        loss, sums = masked_loss(plain, reference, samples, config, old)
        loss.backward()
        wanted = torch.cat([p.grad.flatten() for p in plain.parameters()])
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)
        losses.append(loss.item())
        totals.append(sums)
    mean = {name: sum(sums[name] for sums in totals) for name in totals[0]}
    mean = {name: value / mean["tokens"] for name, value in mean.items()}
    wanted = {
        "loss": np.mean(losses),
        "clip_ratio/low_mean": mean["low"],
        "clip_ratio/high_mean": mean["high"],
        "sampling/logp_difference/mean": mean["mismatch"],
    }
    if reference is not None:
        wanted["kl"] = mean["kl"]
    assert {key: metrics[key] for key in wanted} == pytest.approx(wanted, rel=1e-8, abs=1e-10)
    assert len(seen) == 2 and metrics["clip_ratio/region_mean"] > 0.02
    assert metrics["skipped_updates"] == 0


def test_nan_without_environment_skips_update(make_model):
    """Not a token to leave out: the update is skipped."""
    config, samples = make_config(), make_samples()
    samples.full_logprob[4][-1] = np.nan
    model = make_model()
    prepare_model(model, 64)
    before = parameters_to_vector(model.parameters()).detach().clone()
    learner = make_learner(model, config)
    assert learner.update(samples, ADVANTAGES, 0)[0]["skipped_updates"] == 1
    assert torch.equal(parameters_to_vector(model.parameters()), before)
    config.environment.tools = ["my.tool"]
    assert learner.update(samples, ADVANTAGES, 0)[0]["skipped_updates"] == 0


def test_mask_travels_with_log_probabilities():
    """Rows of two ranks become the same samples on both."""
    samples = episodes()
    launch, world, results = launch_of(samples.groups, GENERATIONS), World(2), {}
    rank_of = np.arange(len(samples)) % 2

    def work(rank: int) -> None:
        ranks, table = SimulatedRanks(world, rank), RowTable(launch, rank_of, rank)
        rows = table.make_rows(20)
        for index, row in rows.items():
            row.tokens, row.finish = samples.tokens[index].astype(np.int64), "stop"
            row.logprob, row.full_logprob = samples.logprob[index], samples.full_logprob[index]
            table.note(index, len(row.tokens), True)
        results[rank] = gather_samples(rows, np.zeros((len(rows), 1)), table, ranks)

    world.run(work)
    for found in results.values():
        assert digest(found) == digest(samples)
        for name in ("logprob", "full_logprob"):
            for ours, wanted in zip(getattr(found, name), getattr(samples, name), strict=True):
                np.testing.assert_array_equal(ours, wanted)
                assert ours.dtype == np.float32
