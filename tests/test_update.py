"""The updates of a step: what they depend on, and when they are skipped. Losses, gradients and
metrics: test_masked_loss.py."""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch

from bubblespec.config import Config, LossConfig, ModelConfig, OptimConfig, RolloutConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.learn import losses
from bubblespec.learn.learner import Learner
from bubblespec.learn.losses import Teacher, policy_loss
from bubblespec.learn.microbatch import plan_microbatches
from bubblespec.learn.optimizer import Optimizer
from bubblespec.records import Samples
from bubblespec.types import Group, Prompt
from tests.helpers.models import VOCAB
from tests.helpers.reference_step import Response, minibatch_loss
from tests.helpers.rows import samples_of

NUM_PROMPTS, GENERATIONS = 4, 3


def make_samples(seed: int = 0, generations: int = GENERATIONS) -> Samples:
    rng = np.random.default_rng(seed)
    prompts = [
        Prompt(i, "x", tuple(rng.integers(1, VOCAB, rng.integers(1, 12)).tolist()), {})
        for i in range(NUM_PROMPTS)
    ]
    tokens = [
        rng.integers(1, VOCAB, rng.integers(1, 20)).astype(np.int32)
        for _ in range(NUM_PROMPTS * generations)
    ]
    logprob = [rng.normal(-3, 0.1, len(t)).astype(np.float32) for t in tokens]
    truncated = np.arange(len(tokens)) % 5 == 2
    groups = [Group(prompt, 0) for prompt in prompts]
    return samples_of(groups, tokens, logprob=logprob, is_truncated=truncated)


def make_config(max_tokens: int = 64, **loss) -> Config:
    return Config(
        model=ModelConfig(path=""),
        rollout=RolloutConfig(temperature=0.8, max_completion_length=20),
        loss=LossConfig(**loss),
        optim=OptimConfig(
            learning_rate=1e-3, max_tokens_per_microbatch=max_tokens, max_grad_norm=0.0
        ),
    )


ADVANTAGES = np.random.default_rng(9).normal(size=NUM_PROMPTS * GENERATIONS)


def moved(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(
                0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    return other


def teacher_of(make_model, config) -> Teacher | None:
    """A model of another architecture, prepared, if the loss has one."""
    if config.loss.loss_type != "distillation" and not config.loss.distillation_coef:
        return None
    return Teacher(make_model("gpt2", max_length=64).requires_grad_(False), "sdpa")


def make_learner(model, config, reference=None, ranks=None, teacher=None) -> Learner:
    ranks = ranks or Ranks(torch.device("cpu"))
    parts = {"config": config, "ranks": ranks, "model": model, "reference": reference}
    parts |= {"optimizer": Optimizer(model, config.optim, 10, ranks), "kernel": "sdpa"}
    rollout = config.rollout
    parts["params"] = SamplingParams(
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        tuple(rollout.stop_token_ids or ()),
        rollout.min_completion_length,
    )
    parts |= {"is_deterministic": config.model.batch_invariant, "teacher": teacher}
    return Learner(**parts, answers_turns=config.environment.is_used)


def gradients(learner: Learner, samples, advantages=ADVANTAGES) -> tuple[list[torch.Tensor], dict]:
    """The reduced gradient of each update of a step, before it, and the step's metrics."""
    optimizer, seen = learner.optimizer, []
    original = optimizer.step

    def noting(*arguments):
        seen.append(optimizer.flat_grad.clone())
        return original(*arguments)

    optimizer.step = noting
    return seen, learner.update(samples, advantages, 0)[0]


def gradient(model, samples, config, advantages=ADVANTAGES, **options) -> tuple[torch.Tensor, dict]:
    """That of the first update. options: of `make_learner`."""
    seen, metrics = gradients(make_learner(model, config, **options), samples, advantages)
    return seen[0], metrics


def responses_of(samples: Samples) -> list[Response]:
    prompts = [list(samples.prompt_of(i).token_ids) for i in range(len(samples))]
    tokens = [t.tolist() for t in samples.tokens]
    return list(map(Response, prompts, tokens, samples.is_truncated))


def oracle(model, samples, config, reference=None) -> tuple[torch.Tensor, float]:
    """Gradient and loss of one update, on-policy, as reference_step.py has them. Leaves the
    gradient in the parameters."""
    model.zero_grad()
    loss, _ = minibatch_loss(model, reference, responses_of(samples), ADVANTAGES.tolist(), config)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), loss.item()


def test_microbatch_plan_is_balanced_complete_and_bounded():
    lengths = np.random.default_rng(0).lognormal(4, 1, 300).astype(np.int64).clip(1, 900)
    lengths[::7] = 0
    plan = plan_microbatches(lengths, 4, 1000)
    everyone = [i for rank in plan for microbatch in rank for i in microbatch]
    assert sorted(everyone) == np.flatnonzero(lengths).tolist()
    assert all(lengths[microbatch].sum() <= 1000 for rank in plan for microbatch in rank)
    loads = [sum(lengths[microbatch].sum() for microbatch in rank) for rank in plan]
    assert max(loads) < 1.01 * min(loads)
    fullest = sum(lengths) / sum(len(rank) for rank in plan)
    assert fullest > 850, "micro-batches should be nearly full"


def infinite_loss(*arguments, **options):
    loss, is_clipped = policy_loss(*arguments, **options)
    return loss + math.inf, is_clipped


NOT_FINITE = ["generation", "loss", "gradient", "another rank", "the loss alone"]
NOT_FINITE += ["another rank's loss alone"]


@pytest.mark.parametrize("where", NOT_FINITE)
def test_nonfinite_update_leaves_weights_unchanged(make_model, monkeypatch, where):
    """Also the optimizer's moments; the next update is whole."""
    runs = []
    for is_broken in (False, True):
        model, ranks = make_model(max_length=100), Ranks(torch.device("cpu"))
        learner = make_learner(model, make_config(), ranks=ranks)
        before = [p.detach().clone() for p in model.parameters()]
        if is_broken:
            samples, advantages = make_samples(), ADVANTAGES.copy()
            with monkeypatch.context() as patch:
                if where == "generation":  # without an environment, whose tokens have no number
                    samples.logprob[4][-1] = np.nan
                elif where == "loss":
                    advantages[4] = np.nan
                elif where == "gradient":
                    hook = model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
                elif where == "the loss alone":  # a constant has no gradient
                    patch.setattr(losses, "policy_loss", infinite_loss)
                elif where == "another rank's loss alone":
                    nan = functools.partial(np.full_like, fill_value=math.nan)
                    patch.setattr(
                        ranks, "all_gather", lambda array, nan=nan: np.stack((array, nan(array)))
                    )
                else:
                    patch.setattr(ranks, "all_reduce_", lambda tensor: tensor.add_(math.nan))
                metrics, _ = learner.update(samples, advantages, 0)
            if where == "gradient":
                hook.remove()
            assert metrics["skipped_updates"] == learner.num_skipped_in_a_row == 1
            assert metrics["learning_rate"] == 0
            is_later = where in ("generation", "gradient", "another rank")
            assert math.isfinite(metrics["loss"]) == is_later
            assert math.isfinite(metrics["grad_norm"]) == where.endswith(("alone", "generation"))
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        metrics, _ = learner.update(make_samples(1), ADVANTAGES, 1)
        assert metrics["skipped_updates"] == learner.num_skipped_in_a_row == 0
        runs.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, runs[0], strict=True))


def test_first_update_is_exactly_on_policy(make_model, monkeypatch):
    """Though each forward is off by more than the one before."""
    calls, ratios = itertools.count(), []
    exact_logprobs, exact_ratio = losses.token_logprobs, losses.importance_ratio

    def rough_logprobs(*arguments, **options):
        return exact_logprobs(*arguments, **options) + 1e-3 * next(calls)

    def recorded_ratio(*arguments):
        ratios.append(exact_ratio(*arguments))
        return ratios[-1]

    monkeypatch.setattr(losses, "token_logprobs", rough_logprobs)
    monkeypatch.setattr(losses, "importance_ratio", recorded_ratio)
    model = make_model(max_length=64)
    gradient(model, make_samples(), make_config(num_iterations=2))
    first, second = ratios[: len(ratios) // 2], ratios[len(ratios) // 2 :]
    assert len(first) == len(second) > 2
    assert all((ratio == 1).all() for ratio in first)
    assert not any((ratio == 1).any() for ratio in second)


@pytest.mark.parametrize("max_tokens", [32, 10_000])
def test_only_samples_with_gradient_are_computed(make_model, max_tokens):
    model, samples, fed = make_model(max_length=64), make_samples(), []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: fed.append(inputs[0].numel())
    )
    config = make_config(max_tokens, num_iterations=2, mask_truncated_completions=True)
    advantages = ADVANTAGES.copy()
    advantages[[0, 7]] = 0.0  # sample 7 is truncated as well
    gradient(model, samples, config, advantages)
    used = [i for i in range(len(samples)) if not samples.is_truncated[i] and advantages[i]]
    assert len(used) == 12 - 1 - 2
    assert max(fed) <= max_tokens
    # Of a response all but the last token are fed.
    assert sum(fed) == 2 * sum(
        len(samples.prompt_of(i).token_ids) + len(samples.tokens[i]) - 1 for i in used
    )


@pytest.mark.parametrize("is_masked", [False, True])
def test_step_without_gradient_has_loss_and_no_means(make_model, is_masked):
    model, samples = make_model(max_length=64), make_samples()
    samples.is_truncated[:] = is_masked
    config = make_config(loss_type="dapo", mask_truncated_completions=True)
    _, metrics = gradient(model, samples, config, ADVANTAGES * is_masked)
    wanted = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 1e-3, "skipped_updates": 0}
    assert {key: value for key, value in metrics.items() if key != "timing_s/sync"} == wanted
