"""A whole GRPO step on one page, to be read beside the papers: sample, advantage, loss, update. The
oracle of the tests.

One sequence at a time, through the model's own forward, in float64. It imports nothing of
bubblespec. Settings have the names of the configuration: `rollout`, `loss` and `optim` are its
sections, or anything with the fields that are read here. `grpo_step`, at the end, puts the parts
together.

Shape legend: T tokens of one response, V vocabulary.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

WORD = 1 << 32


class Response(NamedTuple):
    """A prompt and what was sampled after it."""

    prompt: list[int]
    tokens: list[int]
    is_truncated: bool
    """Ended by the length limit, not by a stop token."""


# Sampling


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), on four
    and two 32-bit words."""
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            second // WORD ^ counter[1] ^ key[0],
            second % WORD,
            first // WORD ^ counter[3] ^ key[1],
            first % WORD,
        ]
        key = [(key[0] + 0x9E3779B9) % WORD, (key[1] + 0xBB67AE85) % WORD]
    return counter


def noise_key(seed: int, prompt_id: int, draw_index: int, sample: int, position: int) -> list[int]:
    """The four words that key the noise of one response token; visit: how often the data
    order has drawn the prompt before; position counts response tokens from 0."""
    return philox(
        [sample << 20 | position, draw_index, prompt_id % WORD, prompt_id // WORD],
        [seed % WORD, seed // WORD],
    )


def random_bits(key: list[int], token: int) -> int:
    """31 random bits: triple32 of Wellons' hash-prospector (github.com/skeeto/hash-prospector),
    with key words between rounds."""
    x = (token + key[0]) % WORD
    for shift, multiplier, word in zip(
        (17, 11, 15), (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB), key[1:], strict=True
    ):
        x = ((x ^ x >> shift) * multiplier + word) % WORD
    return (x ^ x >> 14) % (WORD // 2)


def gumbel(key: list[int], vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [V]: -log(-log(1 - u)), with u uniform in (0, 1)."""
    bits = torch.tensor(
        [random_bits(key, token) for token in range(vocab_size)], dtype=torch.float64
    )
    return -torch.log(-torch.log1p(-((bits + 0.5) / 2**31).clamp(max=1 - 2**-24)))


def allowed_tokens(logits: torch.Tensor, num_generated: int, rollout) -> list[int]:
    """What may be sampled, best first: no stop token before the minimum length, of the rest the
    top k (Fan et al. 2018, arXiv 1805.04833), of those the nucleus, the fewest with probability
    top_p (Holtzman et al. 2019, arXiv 1904.09751, section 3.1).

    logits: [V], divided by the temperature.
    """
    order = logits.sort(descending=True, stable=True).indices.tolist()
    if num_generated < rollout.min_completion_length:
        order = [token for token in order if token not in rollout.stop_token_ids]
    if rollout.top_k:
        order = order[: int((logits[order] >= logits[order[: rollout.top_k]].min()).sum())]
    if rollout.top_p < 1:
        reached = logits[order].softmax(-1).cumsum(-1)
        order = order[: 1 + int((reached < rollout.top_p).sum())]
    return order


@torch.no_grad()
def sample_response(
    model, prompt: list[int], stream: tuple[int, int, int, int], rollout
) -> Response:
    """Token by token argmax(logits / temperature + Gumbel noise), an exact sample of the softmax
    (Maddison et al. 2014, "A* sampling"). stream: seed, prompt_id, draw_index, sample."""
    tokens = []
    while len(tokens) < rollout.max_completion_length:
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        logits = logits / rollout.temperature
        noise = gumbel(noise_key(*stream, len(tokens)), len(logits))
        allowed = allowed_tokens(logits, len(tokens), rollout)
        tokens.append(allowed[int((logits + noise)[allowed].argmax())])
        if tokens[-1] in rollout.stop_token_ids:
            return Response(prompt, tokens, False)
    return Response(prompt, tokens, True)


# Advantages


def estimate_advantages(
    rewards: list[list[float]], estimator: str, scale: str | None = None
) -> list[list[float]]:
    """One number a response. rewards, and the result: by prompt and response.

    grpo: Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; with scale "none" Dr. GRPO (Liu et al.
    2025, arXiv 2503.20783). rloo: Ahmadian et al. 2024 (arXiv 2402.14740), section 3.2.
    reinforce_plus_plus, and with _baseline: Hu et al. 2025 (arXiv
    2501.03262). scale "batch": Liu et al. 2025 (arXiv 2508.08221). Left out, the scale is that of
    the estimator's paper.
    """
    defaults = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}
    defaults |= {"reinforce_plus_plus_baseline": "batch"}
    scale = scale or defaults[estimator]
    everyone = [reward for group in rewards for reward in group]
    centred = []
    for group in rewards:
        compared = everyone if estimator == "reinforce_plus_plus" else group
        baselines = [statistics.fmean(compared)] * len(group)
        if estimator == "rloo" and len(group) > 1:
            baselines = [statistics.fmean(group[:i] + group[i + 1 :]) for i in range(len(group))]
        centred.append([r - baseline for r, baseline in zip(group, baselines, strict=True)])
    if estimator.startswith("reinforce_plus_plus"):
        everyone = [value for group in centred for value in group]
    advantages = []
    for group, values in zip(rewards, centred, strict=True):
        spread = {"group": group, "batch": everyone, "none": []}[scale]
        divisor = statistics.stdev(spread) + 1e-4 if len(spread) > 1 else 1.0
        advantages.append([value / divisor for value in values])
    return advantages


# Loss


def log_distributions(model, response: Response, rollout, policy=None) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary at each token of a response, [T, V], -inf where the
    policy may not sample now: what it was trained to do is sampled as in `sample_response`. The
    response's own tokens stay, should the weights have changed since. policy: if not the model."""
    tokens = torch.tensor([[*response.prompt, *response.tokens]])
    logits = model(input_ids=tokens).logits[0, len(response.prompt) - 1 : -1] / rollout.temperature
    if not (rollout.min_completion_length or rollout.top_k or rollout.top_p < 1):
        return logits.log_softmax(-1)
    if policy is not None:
        own = policy(input_ids=tokens).logits[0, len(response.prompt) - 1 : -1]
        own = own.detach() / rollout.temperature
    bars = torch.full_like(logits, -math.inf)
    for t, row in enumerate(logits.detach() if policy is None else own):
        bars[t, [*allowed_tokens(row, t, rollout), response.tokens[t]]] = 0
    return (logits + bars).log_softmax(-1)


def token_logprobs(model, response: Response, rollout, policy=None) -> torch.Tensor:
    """Log-probability of each token of a response, [T]; see `log_distributions`."""
    index = torch.tensor(response.tokens)[:, None]
    return log_distributions(model, response, rollout, policy).gather(1, index)[:, 0]


def kl_estimate(logprob: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || reference) of each token (Schulman, joschu.net/blog/kl-approx.html; k3 is GRPO's
    equation 4). [T] -> [T]."""
    r = reference - logprob
    return {"k1": -r, "k2": r**2 / 2, "k3": r.exp() - 1 - r}[estimator]


def jensen_shannon(teacher: torch.Tensor, policy: torch.Tensor, beta: float) -> torch.Tensor:
    """Generalized Jensen-Shannon divergence of each token (GKD, arXiv 2306.13649, equation 1), its
    limits divided by beta or 1 - beta at the ends, as in TRL. Log-probabilities [T, V] -> [T], -inf
    for the same tokens in both: with a 1 in its place such a token adds 0."""
    p, q = (values.exp().where(policy > -math.inf, 1.0) for values in (teacher, policy))
    if beta in (0, 1):
        return (q * (q / p).log() if beta else p * (p / q).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)


def token_losses(
    logprob: torch.Tensor,
    old: torch.Tensor,
    advantage: float,
    loss,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of each token of a response, [T], and of which tokens a clip decides it, bool [T] by the
    clip's name.

    logprob, old, reference: [T], of the policy, of the one that has sampled, and of the one that
    the policy is kept near. The loss is minus the objective of GRPO's equation 3 (arXiv
    2402.03300), with what other papers put into its place.
    """
    log_ratio = logprob - old
    if loss.importance_sampling_level == "sequence":  # GSPO (arXiv 2507.18071), equation 7
        log_ratio = log_ratio.mean().expand(len(log_ratio))
    ratio = log_ratio.exp()
    if loss.loss_type == "cispo":
        # MiniMax-M1 (arXiv 2506.13585), equations 4 and 5: the weight has no gradient
        objective = ratio.detach().clamp(max=loss.epsilon_high) * advantage * logprob
        clips = {"high": ratio > loss.epsilon_high}
    else:  # PPO (arXiv 1707.06347), equation 7; two clips: DAPO (arXiv 2503.14476), equation 10
        clipped = ratio.clamp(1 - loss.epsilon_low, 1 + loss.epsilon_high)
        objective = torch.minimum(ratio * advantage, clipped * advantage)
        if loss.delta is not None and advantage < 0:  # dual clip (arXiv 1912.09729), equation 5
            objective = objective.clamp(min=loss.delta * advantage)
        is_clipped = objective != ratio * advantage
        clips = {
            "low": is_clipped & (ratio < 1),
            "high" if advantage > 0 else "delta": is_clipped & (ratio > 1),
        }
    if reference is None:
        return -objective, clips
    return loss.kl_coef * kl_estimate(logprob, reference, loss.kl_estimator) - objective, clips


def mean_loss(
    losses: list[torch.Tensor], count: int, loss_type: str, max_completion_length: int
) -> torch.Tensor:
    """The mean over the tokens of an update. losses: [T] of each response in the loss, at least
    one; count: masked ones too."""
    if loss_type == "grpo":  # equation 3: of each response, then of all
        return sum(values.mean() for values in losses) / count
    if loss_type == "dr_grpo":  # arXiv 2503.20783: a constant in place of the length
        return sum(values.sum() for values in losses) / (count * max_completion_length)
    # DAPO, equation 12; CISPO, equation 4: of all tokens
    return sum(values.sum() for values in losses) / sum(len(values) for values in losses)


def minibatch_loss(
    model,
    reference,
    responses: list[Response],
    advantages: list[float],
    config,
    old: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """The loss of one update, and the clips of each response. old: log-probabilities under the
    policy that has sampled, if it is not the policy as it is; reference: a model, if there is a KL
    term."""
    losses, clips, loss, rollout = [], [], config.loss, config.rollout
    for i, (response, advantage) in enumerate(zip(responses, advantages, strict=True)):
        clips.append({})
        if loss.mask_truncated_completions and response.is_truncated:
            continue
        logprob, other = token_logprobs(model, response, rollout), None
        before = logprob.detach() if old is None else old[i]
        if reference is not None:
            other = token_logprobs(reference, response, rollout, model).detach()
        token_loss, clips[-1] = token_losses(logprob, before, advantage, loss, other)
        losses.append(token_loss)
    length = rollout.max_completion_length
    return mean_loss(losses, len(responses), loss.loss_type, length), clips


# Update


def learning_rate(optim, step: int, max_steps: int) -> float:
    """Linear warm-up (Goyal et al. 2017, arXiv 1706.02677, section 2.2), then constant, linear, or
    half a cosine (Loshchilov and Hutter 2016, arXiv 1608.03983, equation 5) down to 0."""
    if step < optim.warmup_steps:
        return optim.learning_rate * (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(max_steps - optim.warmup_steps, 1)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return optim.learning_rate * share[optim.lr_scheduler_type]


@torch.no_grad()
def adamw_update(
    parameters, moments: dict, optim, step: int, max_steps: int
) -> tuple[float, float]:
    """Clip the gradients by their common norm (Pascanu et al. 2013, arXiv 1211.5063, algorithm 1),
    then AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2), which decays matrices
    alone. Clears the gradients. Returns the norm before clipping and the learning rate. moments: by
    parameter, {} before the first update."""
    parameters = [p for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in parameters))
    rate, shrink = learning_rate(optim, step, max_steps), 1.0
    if optim.max_grad_norm and norm > optim.max_grad_norm:
        shrink = optim.max_grad_norm / norm
    for p in parameters:
        m, v, t = moments.get(p, (0.0, 0.0, 0))
        gradient, t = shrink * p.grad, t + 1
        beta1, beta2 = optim.adam_betas
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        unbiased_m, unbiased_v = m / (1 - beta1**t), v / (1 - beta2**t)
        decay = rate * optim.weight_decay * p if p.ndim >= 2 else 0.0
        p -= rate * unbiased_m / (unbiased_v.sqrt() + optim.adam_epsilon) + decay
        moments[p], p.grad = (m, v, t), None
    return norm, rate


# The step


class Update(NamedTuple):
    """What one update was; gradient and its norm before clipping, that of all parameters flat."""

    loss: float
    clips: list[dict[str, torch.Tensor]]
    gradient: torch.Tensor
    grad_norm: float
    learning_rate: float


def train_on(
    model,
    reference,
    responses: list[Response],
    advantages: list[float],
    *,
    config,
    step: int,
    moments: dict,
) -> list[Update]:
    """The updates of a step: PPO's passes over minibatches (arXiv 1707.06347, algorithm 1), each of
    whole groups, in order."""
    size, updates = len(responses) // config.loss.num_minibatches, []
    with torch.no_grad():
        old = [token_logprobs(model, r, config.rollout) for r in responses]
    for first in [*range(0, len(responses), size)] * config.loss.num_iterations:
        part = slice(first, first + size)
        loss, clips = minibatch_loss(
            model, reference, responses[part], advantages[part], config, old[part]
        )
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        norm_and_rate = adamw_update(
            model.parameters(), moments, config.optim, step, config.run.max_steps
        )
        updates.append(Update(loss.item(), clips, gradient, *norm_and_rate))
    return updates


def grpo_step(
    model,
    reference,
    prompts: list[tuple[int, int, list[int]]],
    reward: Callable[[list], list[float]],
    *,
    config,
    step,
    moments: dict,
) -> tuple[list[list[Response]], list[list[float]], list[list[float]], list[Update]]:
    """One step of training, which changes the weights of `model` and the moments: GRPO's algorithm
    1 within its loops. Returns responses, rewards and advantages, by prompt and response, and the
    updates.

    prompts: prompt_id, draw_index and tokens of each; reward: from the responses of a prompt, as
    tokens, to a number for each.
    """
    loss, rollout, samples = config.loss, config.rollout, range(config.rollout.num_generations)
    groups = [
        [
            sample_response(
                model, tokens, (config.run.seed, prompt_id, draw_index, sample), rollout
            )
            for sample in samples
        ]
        for prompt_id, draw_index, tokens in prompts
    ]
    rewards = [reward([response.tokens for response in group]) for group in groups]
    advantages = estimate_advantages(rewards, loss.advantage_estimator, loss.scale_rewards)
    flat = [[value for group in by_prompt for value in group] for by_prompt in (groups, advantages)]
    updates = train_on(model, reference, *flat, config=config, step=step, moments=moments)
    return groups, rewards, advantages, updates
