"""The gradient step against a plain, padded, one-sequence-at-a-time computation with the model's own forward."""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import VOCAB

from bubblespec.config import Config, LossConfig, ModelConfig, OptimConfig, RolloutConfig
from bubblespec.data import Prompt
from bubblespec.distributed import Ranks
from bubblespec.engine.model import enable_gradient_checkpointing, prepare_model
from bubblespec.microbatch import plan_microbatches
from bubblespec.optimizer import Optimizer
from bubblespec.rollout import Samples
from bubblespec.update import train_on_samples

NUM_PROMPTS, GENERATIONS = 4, 3


def make_samples(seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    prompts = [Prompt(i, "x", tuple(rng.integers(1, VOCAB, rng.integers(1, 12)).tolist()), {}) for i in range(NUM_PROMPTS)]
    tokens = [rng.integers(1, VOCAB, rng.integers(1, 20)).astype(np.int32) for _ in range(NUM_PROMPTS * GENERATIONS)]
    logprob = [rng.normal(-3, 0.1, len(t)).astype(np.float32) for t in tokens]
    truncated = np.arange(len(tokens)) % 5 == 2
    return Samples(prompts, GENERATIONS, tokens, logprob, logprob, truncated, np.zeros((len(tokens), 1)))


def make_config(max_tokens: int = 64, **loss) -> Config:
    return Config(
        model=ModelConfig(path=""),
        rollout=RolloutConfig(temperature=0.8, max_completion_length=20),
        loss=LossConfig(**loss),
        optim=OptimConfig(learning_rate=1e-3, max_tokens_per_microbatch=max_tokens, max_grad_norm=0.0),
    )


ADVANTAGES = np.random.default_rng(9).normal(size=NUM_PROMPTS * GENERATIONS)


def gradient(model, samples, config, advantages=ADVANTAGES, reference=None, ranks=None) -> tuple[torch.Tensor, dict]:
    """The reduced gradient of one step, taken just before the update."""
    optimizer = Optimizer(model, config.optim, 10)
    seen = []
    original = optimizer.step
    optimizer.step = lambda *arguments: (seen.append(optimizer.flat_grad.clone()), original(*arguments))[1]
    ranks = ranks or Ranks(torch.device("cpu"))
    metrics = train_on_samples(model, reference, optimizer, samples, advantages, config, ranks, 0, "sdpa")
    return seen[0], metrics


def oracle(model, samples, config, reference=None) -> tuple[torch.Tensor, float]:
    """Sequence by sequence with plain SDPA and the textbook formula of each loss type, ratio 1."""
    loss_type, total = config.loss.loss_type, 0.0
    used = [not (config.loss.mask_truncated_completions and t) for t in samples.is_truncated]
    count = len(samples)
    for i in range(count):
        prompt, response = samples.prompt_of(i).token_ids, samples.tokens[i].tolist()
        ids = torch.tensor([[*prompt, *response]])

        def logprobs(m, ids=ids, prompt=prompt):
            logits = m(input_ids=ids).logits[0, len(prompt) - 1 : -1] / config.rollout.temperature
            return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]

        logprob = logprobs(model)
        per_token = -(logprob - logprob.detach()).exp() * ADVANTAGES[i]
        if reference is not None:
            difference = logprobs(reference).detach() - logprob
            per_token = per_token + config.loss.kl_coef * (difference.exp() - 1 - difference)
        if not used[i]:
            continue
        if loss_type == "grpo":
            total = total + per_token.mean() / count
        elif loss_type == "dr_grpo":
            total = total + per_token.sum() / (count * config.rollout.max_completion_length)
        else:
            total = total + per_token.sum() / sum(len(t) for t, u in zip(samples.tokens, used, strict=True) if u)
    model.zero_grad()
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), total.item()


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("extra", [{}, {"mask_truncated_completions": True}, {"kl_coef": 0.3}])
def test_loss_and_gradient_equal_the_plain_computation(make_model, loss_type, extra):
    plain = make_model()
    plain.set_attn_implementation("sdpa")
    reference = None
    if "kl_coef" in extra:
        reference = copy.deepcopy(plain)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    samples, config = make_samples(), make_config(loss_type=loss_type, **extra)
    wanted, wanted_loss = oracle(plain, samples, config, reference)
    packed = make_model()
    prepare_model(packed, 64)
    if reference is not None:
        reference = copy.deepcopy(reference)
        prepare_model(reference, 64)
    got, metrics = gradient(packed, samples, config, reference=reference)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    assert abs(metrics["loss"] - wanted_loss) < 1e-10


def test_microbatches_do_not_change_the_gradient(make_model):
    results = []
    for max_tokens in (32, 64, 1000):
        model = make_model("qwen2")
        prepare_model(model, 64)
        results.append(gradient(model, make_samples(), make_config(max_tokens))[0])
    torch.testing.assert_close(results[0], results[2], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(results[1], results[2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_the_work_and_sum_to_the_same_gradient(make_model, world_size):
    """Each rank's part is computed in turn; their sum is what the collective would give."""
    single = make_model()
    prepare_model(single, 64)
    wanted, _ = gradient(single, make_samples(), make_config())
    parts = []
    for rank in range(world_size):
        model = make_model()
        prepare_model(model, 64)
        ranks = Ranks(torch.device("cpu"))
        ranks.rank, ranks.world_size = rank, world_size
        ranks.sum_ = lambda tensor: tensor
        ranks.gather = lambda array: array[None]
        parts.append(gradient(model, make_samples(), make_config(), ranks=ranks)[0])
    assert all(part.any() for part in parts)
    torch.testing.assert_close(sum(parts), wanted, rtol=1e-9, atol=1e-12)


def test_gradient_does_not_depend_on_the_generators_logprobs(make_model):
    """Bit for bit: only tokens may enter it, whatever the schedule's rounding was."""
    results = []
    for noise in (0.0, 0.5):
        model, samples = make_model(dtype=torch.float32), make_samples()
        samples.full_logprob = [values + np.float32(noise) for values in samples.full_logprob]
        prepare_model(model, 64)
        results.append(gradient(model, samples, make_config()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1]["sampling/logp_difference/mean"] != results[1][1]["sampling/logp_difference/mean"]


def test_zero_advantages_are_skipped_without_changing_the_gradient(make_model):
    advantages = ADVANTAGES.copy()
    advantages[:GENERATIONS] = 0.0
    model, tiny = make_model(), make_model()
    prepare_model(model, 64)
    prepare_model(tiny, 64)
    skipped, metrics = gradient(model, make_samples(), make_config(), advantages)
    computed, _ = gradient(tiny, make_samples(), make_config(), np.where(advantages == 0, 1e-300, advantages))
    torch.testing.assert_close(skipped, computed, rtol=1e-12, atol=1e-15)
    nothing, metrics = gradient(model, make_samples(), make_config(), np.zeros_like(advantages))
    assert not nothing.any() and metrics["loss"] == 0.0 and "entropy" not in metrics


def test_later_iterations_clip_against_the_first(make_model):
    """With a large learning rate the second iteration's ratios leave the clip range, and its gradient is the clipped one."""
    model = make_model()
    prepare_model(model, 64)
    config = make_config(num_iterations=3, epsilon_low=0.05, epsilon_high=0.05)
    config.optim.learning_rate = 0.02
    _, metrics = gradient(model, make_samples(), config)
    assert metrics["clip_ratio/region_mean"] > 0.1


def test_gradient_checkpointing_recomputes_and_gives_the_same_gradient(make_model):
    results, layer_calls = [], []
    for checkpointing in (False, True):
        model, config = make_model(), make_config()
        prepare_model(model, 64)
        calls = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            enable_gradient_checkpointing(model)
            config.model.gradient_checkpointing = True
        results.append(gradient(model, make_samples(), config)[0])
        layer_calls.append(len(calls))
    assert torch.equal(*results)
    assert layer_calls[1] == 2 * layer_calls[0]


def test_plan_is_balanced_complete_and_within_its_budget():
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


def test_every_reduction_is_an_event_of_its_own(make_model):
    """Two updates train between their reductions: joined, the events would cover that time too."""
    model, events = make_model(), []
    prepare_model(model, 100)
    config, ranks = make_config(num_iterations=2), Ranks(torch.device("cpu"))
    optimizer = Optimizer(model, config.optim, 10)
    metrics = train_on_samples(model, None, optimizer, make_samples(), ADVANTAGES, config, ranks, 0, "sdpa", events)
    (first, second) = events
    assert first[0] == second[0] == "sync" and first[1] <= first[2] < second[1] <= second[2]
    assert metrics["timing_s/sync"] == pytest.approx(sum(end - begin for _, begin, end in events))


@pytest.mark.parametrize("where", ["loss", "gradient", "another rank"])
def test_an_update_that_is_not_finite_changes_nothing(make_model, where):
    """Weights and the optimizer's moments are as if the step had not been, and the next one is whole."""
    runs = []
    for broken in (False, True):
        model, config, ranks = make_model(), make_config(), Ranks(torch.device("cpu"))
        prepare_model(model, 100)
        optimizer = Optimizer(model, config.optim, 10)
        before = [p.detach().clone() for p in model.parameters()]
        if broken:
            advantages, restore, original = ADVANTAGES.copy(), lambda: None, ranks.sum_
            if where == "loss":
                advantages[4] = np.nan
            elif where == "gradient":
                handle = model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
                restore = handle.remove
            else:
                ranks.sum_ = lambda tensor: tensor.add_(math.nan)
            metrics = train_on_samples(model, None, optimizer, make_samples(), advantages, config, ranks, 0, "sdpa")
            ranks.sum_ = original
            restore()
            assert metrics["skipped_updates"] == 1 and metrics["learning_rate"] == 0
            assert not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]))
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        metrics = train_on_samples(model, None, optimizer, make_samples(1), ADVANTAGES, config, ranks, 1, "sdpa")
        assert metrics["skipped_updates"] == 0 and metrics["learning_rate"] > 0
        assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        runs.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
