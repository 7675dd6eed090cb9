"""Episodes: what an environment has added to a response is fed, and is in no loss, mean or metric.
Against the masked sums as the papers write them, in float64, one sequence at a time."""

import numpy as np
import pytest
import torch
from test_streaming import (
    CASES as STREAMED,
)
from test_streaming import (
    REWARDS,
    advantages_of,
    assert_same_gradient,
    reference_of,
    stream_groups,
)
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

from bubblespec.engine.model import prepare_model
from bubblespec.learn.microbatch import pack_responses
from bubblespec.mechanisms.stream_gradients.gradients import StreamedGradients
from bubblespec.rollout.gather import gather_samples
from bubblespec.rollout.table import RowTable
from bubblespec.tools.simulate.world import SimulatedRanks, World
from bubblespec.types import digest
from tests.helpers.reference_step import kl_estimate, token_logprobs
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


def updates(make_model, config, samples, advantages, num_ranks: int, stream=None):
    """The updates of a step on threads as ranks: of each the gradient and the weights before it,
    and the step's metrics. stream: called with rank and learner before them."""
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
        if stream is not None:
            stream(rank, learner)
        results[rank] = seen, learner.update(samples, advantages, 0)[0]

    world.run(work)
    for rank in range(1, num_ranks):
        for ours, others in zip(results[0][0], results[rank][0], strict=True):
            assert all(map(torch.equal, ours, others))
    return results[0]


def masked_loss(model, reference, samples, config, old: list[torch.Tensor]):
    """The loss of all samples, and sums over the tokens that count, as `MEASURED` has them."""
    loss, rollout, total = config.loss, config.rollout, 0.0
    sums = dict.fromkeys(("low", "high", "kl", "mismatch", "tokens"), 0.0)
    masks = [torch.from_numpy(~np.isnan(logprob)).double() for logprob in samples.full_logprob]
    is_used = ~(samples.is_truncated & loss.mask_truncated_completions)
    num_tokens = sum(mask.sum() for mask, used in zip(masks, is_used, strict=True) if used)
    for i, response in enumerate(responses_of(samples)):
        if not is_used[i]:
            continue
        mask, advantage = masks[i], ADVANTAGES[i]
        logprob = token_logprobs(model, response, rollout.temperature)
        log_ratio = logprob - old[i]
        if loss.importance_sampling_level == "sequence":
            mean = (mask * log_ratio).sum() / mask.sum().clamp(min=1)
            log_ratio = mean.expand(len(mask))
        ratio = log_ratio.exp()
        is_low = (ratio < 1 - loss.epsilon_low) & bool(advantage < 0)
        is_high = (ratio > 1 + loss.epsilon_high) & bool(advantage > 0)
        clipped = ratio.clamp(1 - loss.epsilon_low, 1 + loss.epsilon_high)
        bounded = ratio if loss.delta is None else ratio.clamp(max=loss.delta)
        token_loss = -torch.minimum(bounded * advantage, clipped * advantage)
        if loss.loss_type == "cispo":
            is_low, is_high = torch.zeros_like(is_low), ratio > loss.epsilon_high
            token_loss = -ratio.detach().clamp(max=loss.epsilon_high) * advantage * logprob
        kl = torch.zeros_like(logprob)
        if reference is not None:
            other = token_logprobs(reference, response, rollout.temperature).detach()
            kl = kl_estimate(logprob, other, loss.kl_estimator)
        value = (mask * (token_loss + loss.kl_coef * kl)).sum()
        if loss.loss_type == "grpo":
            value = value / mask.sum().clamp(min=1) / len(samples)
        elif loss.loss_type == "dr_grpo":
            value = value / (len(samples) * rollout.max_completion_length)
        else:
            value = value / num_tokens
        total += value
        generated = torch.from_numpy(np.nan_to_num(samples.full_logprob[i]))
        values = (is_low, is_high, kl, (old[i] - generated).abs(), torch.ones_like(mask))
        for name, of_tokens in zip(sums, values, strict=True):
            sums[name] += (mask * of_tokens).sum().item()
    return total, sums


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("exact_norms")
def test_gradients_and_metrics_are_those_of_the_masked_sums(make_model, case, num_ranks):
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


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("case", STREAMED)
@pytest.mark.usefixtures("exact_norms")
def test_streamed_gradients_are_those_of_the_update(make_model, case, num_ranks):
    samples, config = episodes(), config_of(STREAMED[case])
    advantages = advantages_of(REWARDS, config)
    streamed = []

    def stream(rank: int, learner) -> None:
        gradients = StreamedGradients(learner)
        stream_groups(gradients, samples, [3, 0], own=lambda place: place % num_ranks == rank)
        streamed.extend(gradients.ids)

    wanted = updates(make_model, config, samples, advantages, 1)
    got = updates(make_model, config, samples, advantages, num_ranks, stream)
    assert_same_gradient(got[0][0][0], wanted[0][0][0])
    empty = {samples.ids[i] for i in np.flatnonzero(samples.num_sampled == 0)}
    assert len(streamed) >= 3 and empty.isdisjoint(streamed)
    for name in wanted[1].keys() - {"timing_s/sync"}:
        assert got[1][name] == pytest.approx(wanted[1][name], rel=1e-9, abs=1e-12), name


def test_without_observations_all_response_tokens_are_targets():
    samples = make_samples()
    prompts = [samples.prompt_of(i).token_ids for i in range(len(samples))]
    batch = pack_responses(prompts, samples.tokens, samples.full_logprob, torch.device("cpu"))
    assert batch.lengths.tolist() == samples.lengths.tolist()
    assert batch.target.tolist() == np.concatenate(samples.tokens).tolist()
    assert torch.equal(batch.generated, torch.from_numpy(np.concatenate(samples.full_logprob)))
    fed = iter(batch.predicts.tolist())
    end = 0
    for prompt, tokens in zip(prompts, samples.tokens, strict=True):
        end += len(prompt) + len(tokens) - 1
        assert [next(fed) for _ in tokens] == list(range(end - len(tokens), end))


def test_nan_is_a_failure_where_there_is_no_environment(make_model):
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


def test_the_mask_travels_with_the_log_probabilities():
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
