"""The policy that samples is the policy that is trained: gradients with top_p, top_k and a minimum
length, on a vocabulary of four, of which all responses can be listed."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_update import make_config, make_learner
from transformers import LlamaConfig, LlamaForCausalLM

from bubblespec.engine.model_checks import prepare_model
from bubblespec.learn.losses import Teacher
from bubblespec.learn.microbatch import make_minibatches
from bubblespec.types import Group, Prompt
from tests.helpers.reference_step import Response, jensen_shannon, log_distributions
from tests.helpers.rows import samples_of

PROMPT, LENGTH, STOP = (1, 3, 2), 3, 0
RULES = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 2},
    "a minimum length": {"min_completion_length": 3},
    "all": {"top_p": 0.8, "top_k": 3, "min_completion_length": 2},
}
RESPONSES = [
    tokens
    for length in range(1, LENGTH + 1)
    for tokens in itertools.product(range(4), repeat=length)
    if STOP not in tokens[:-1] and (length == LENGTH or tokens[-1] == STOP)
]


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=4, **sizes, num_attention_heads=2, initializer_range=0.5)
    return LlamaForCausalLM(config).double().eval()


def policy_of(model, rollout, policy=None) -> list[torch.Tensor]:
    """Log-probabilities at each token of each response, [T, V]; see `log_distributions`."""
    responses = [Response(list(PROMPT), list(tokens), False) for tokens in RESPONSES]
    return [log_distributions(model, response, rollout, policy) for response in responses]


def test_responses_of_truncated_policy_sum_to_one():
    for rules in RULES.values():
        rollout = replace(make_config().rollout, **rules, stop_token_ids=[STOP])
        chances = [p for p in probabilities(make_model(), rollout).tolist() if p]
        assert sum(chances) == pytest.approx(1, abs=1e-12) and len(chances) < len(RESPONSES)


def probabilities(model, rollout) -> torch.Tensor:
    """Chance of each response under the truncated policy, token by token, [responses]."""
    chances = []
    for tokens in RESPONSES:
        chance = torch.ones((), dtype=torch.float64)
        for t, token in enumerate(tokens):
            logits = model(input_ids=torch.tensor([[*PROMPT, *tokens[:t]]])).logits[0, -1]
            best = (logits / rollout.temperature).softmax(-1)
            is_early = t < rollout.min_completion_length
            order = sorted(range(4), key=lambda v, of=best: -of[v])
            kept = [v for v in order if not (is_early and v == STOP)][: rollout.top_k or None]
            mass = best / best[kept].sum()
            sums = np.cumsum([0.0, *(mass[v].item() for v in kept)])[:-1]
            kept = [v for v, before in zip(kept, sums, strict=True) if before < rollout.top_p]
            chance = chance * (best[token] / best[kept].sum() if token in kept else 0.0)
        chances.append(chance)
    return torch.stack(chances)


@pytest.mark.parametrize("divergence", [None, "reference", "teacher"])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.usefixtures("exact_norms")
def test_mean_gradient_of_all_samples_is_exact(rules, divergence):
    """The gradient of the expected reward, and of the expected divergence along the responses."""
    config = make_config(1000, loss_type="dr_grpo", kl_estimator="k2")
    rollout = config.rollout = replace(config.rollout, **RULES[rules], stop_token_ids=[STOP])
    config.loss.kl_coef = 0.5 if divergence == "reference" else 0.0
    config.loss.distillation_coef = 0.5 if divergence == "teacher" else 0.0
    config.loss.distillation_beta = 0.3
    model = make_model()
    plain, other = make_model(), make_model(1)
    rewards = torch.linspace(-1, 2, len(RESPONSES), dtype=torch.float64)

    chances = probabilities(plain, rollout)
    wanted = -(chances * rewards).sum()
    log_q = policy_of(plain, rollout)
    log_p = [values.detach() for values in policy_of(other, rollout, plain)]
    for chance, q, p in zip(chances.detach(), log_q, log_p, strict=True):
        # at each token, which a response reaches with a constant chance; beta 1: KL(q || p)
        if divergence is not None:
            beta = 1 if divergence == "reference" else 0.3
            wanted = wanted + 0.5 * chance * jensen_shannon(p, q, beta).sum()
    wanted.backward()

    prepare_model(model, 16)
    prepare_model(other, 16)
    other.requires_grad_(False)
    tokens = [np.array(response, np.int32) for response in RESPONSES]
    zeros = [np.zeros(len(response), np.float32) for response in RESPONSES]
    samples = samples_of([Group(Prompt(0, "x", PROMPT, {}), 0)], tokens, logprob=zeros)
    reference = other if divergence == "reference" else None
    teacher = Teacher(other, "sdpa") if divergence == "teacher" else None
    learner = make_learner(model, config, reference, teacher=teacher)
    is_trained = chances.detach().numpy() > 0
    (batches,), *_ = make_minibatches(samples, is_trained, config=config, ranks=learner.ranks)
    for batch in batches:
        learner.accumulate_gradient(batch, rewards.numpy(), chances.detach().numpy())
    for found, true in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, true.grad, rtol=1e-9, atol=1e-12)
