"""Micro-batches, each one forward and backward.

Minibatches of whole groups are balanced over ranks and packed without padding."""

from dataclasses import dataclass

import numpy as np
import torch

from bubblespec.config import Config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.arrays import to_device
from bubblespec.learn.losses import common_factor, local_weights
from bubblespec.records import Samples, count_sampled
from bubblespec.types import completion_mask


@dataclass
class Microbatch:
    """B packed sequences on the device, prompt and response each.

    N tokens are fed, of which M predict a sampled token; an environment's are fed, and no
    targets."""

    order: list[int]
    """Index of each sequence among the samples, [B]."""
    lengths: torch.Tensor
    """Sampled tokens of each sequence, int64 [B]."""
    input_ids: torch.Tensor
    """Tokens fed, int64 [N]."""
    sequence_lengths: list[int]
    """Tokens fed of each sequence, [B]."""
    prompt_lengths: list[int]
    """Prompt tokens of each sequence, [B]."""
    predicts: torch.Tensor
    """Positions in `input_ids` that predict sampled tokens, int64 [M]."""
    target: torch.Tensor
    """Sampled tokens, int64 [M]."""
    num_generated: torch.Tensor
    """Response tokens before each sampled token, int64 [M]."""
    generated: torch.Tensor
    """Log-probabilities of the sampled tokens as the generator has them, float [M]."""
    old: torch.Tensor | None = None
    """Log-probabilities of the sampled tokens under the old policy, float [M], once known."""
    reference: torch.Tensor | None = None
    """Log-probabilities of the sampled tokens under the reference, float [M], once known; with
    truncated sampling by the tokens that the policy keeps in this update."""


def plan_microbatches(
    lengths: np.ndarray, world_size: int, max_tokens: int
) -> list[list[list[int]]]:
    """Return sample indices by rank and micro-batch. lengths: tokens to train on, int64 [S].

    Longest first: to the rank with the fewest tokens so far, and there into the first micro-batch
    with room. A pure function of the lengths, so equal tokens give equal micro-batches."""
    load = np.zeros(world_size, np.int64)
    plan: list[list[list[int]]] = [[] for _ in range(world_size)]
    rooms: list[list[int]] = [[] for _ in plan]
    for index in np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)].tolist():
        rank, needed = int(load.argmin()), min(int(lengths[index]), max_tokens)
        room = rooms[rank]
        place = next((i for i, left in enumerate(room) if left >= needed), len(room))
        if place == len(room):
            room.append(max_tokens)
            plan[rank].append([])
        plan[rank][place].append(index)
        room[place] -= needed  # a longer sample fills a micro-batch of its own
        load[rank] += lengths[index]
    return plan


def pack_responses(
    prompts: list[tuple[int, ...]],
    tokens: list[np.ndarray],
    generated: list[np.ndarray],
    device: torch.device,
    order: list[int] | None = None,
) -> Microbatch:
    """Pack prompts and responses, each without its last token, which predicts nothing.

    generated: log-probabilities as the generator has them, NaN for an environment's tokens; at
    least one is a number. order: see `Microbatch`, by default that of these lists."""
    fed = [np.concatenate((p, t[:-1])) for p, t in zip(prompts, tokens, strict=True)]
    sequence_lengths = [len(sequence) for sequence in fed]
    ends = np.cumsum(sequence_lengths)
    predicts = [np.arange(end - len(t), end) for end, t in zip(ends, tokens, strict=True)]
    places = [np.arange(len(t)) for t in tokens]
    logprob = np.concatenate(generated)
    is_target = completion_mask(logprob)
    return Microbatch(
        order=list(range(len(tokens))) if order is None else order,
        lengths=to_device(count_sampled(generated), device),
        input_ids=to_device(np.concatenate(fed).astype(np.int64), device),
        sequence_lengths=sequence_lengths,
        prompt_lengths=[len(prompt) for prompt in prompts],
        predicts=to_device(np.concatenate(predicts)[is_target], device),
        target=to_device(np.concatenate(tokens)[is_target].astype(np.int64), device),
        num_generated=to_device(np.concatenate(places)[is_target], device),
        generated=to_device(logprob[is_target], device),
    )


def make_minibatches(
    samples: Samples,
    has_gradient: np.ndarray,
    *,
    config: Config,
    ranks: Ranks,
    scales_later: bool = False,
) -> tuple[list[list[Microbatch]], np.ndarray, list[float]]:
    """Return this rank's micro-batches of every minibatch, weights, and factors of minibatches.

    weights: of each sample's tokens, float64 [S]; factors: by which to scale the gradient of each
    minibatch. With `scales_later` it is the factor that the minibatch's samples share, and weights
    lack it; otherwise 1. Minibatches are whole groups, in the order of the batch, whatever the
    number of ranks. Each is normalised by its own counts, as if it were the whole batch."""
    loss, num_sampled, is_used = config.loss, samples.num_sampled, is_in_loss(samples, config)
    prompt_lengths = [len(samples.prompt_of(i).token_ids) for i in range(len(samples))]
    to_train = np.where(has_gradient, samples.lengths + np.array(prompt_lengths), 0)
    minibatches, factors, weights = [], [], local_weights(loss.loss_type, num_sampled)
    by_group = np.arange(len(samples)).reshape(-1, samples.num_generations)
    num_minibatches = min(loss.num_minibatches, len(by_group))  # groups may have been left out
    for members in map(np.ravel, np.array_split(by_group, num_minibatches)):
        limit = config.rollout.max_completion_length
        factor = common_factor(loss.loss_type, num_sampled[members], is_used[members], limit)
        if not scales_later:
            weights[members] *= factor
            factor = 1.0
        factors.append(factor)
        own = plan_microbatches(
            to_train[members], ranks.world_size, config.optim.max_tokens_per_microbatch
        )[ranks.rank]
        microbatches = []
        for order in (members[indices].tolist() for indices in own):
            prompts = [samples.prompt_of(i).token_ids for i in order]
            tokens = [samples.tokens[i] for i in order]
            generated = [samples.logprob[i] for i in order]
            microbatches.append(pack_responses(prompts, tokens, generated, ranks.device, order))
        minibatches.append(microbatches)
    return minibatches, weights, factors


def is_in_loss(samples: Samples, config: Config) -> np.ndarray:
    """Return which samples are in the loss, bool [S]."""
    is_used = samples.num_sampled > 0  # a response may be an environment's alone
    return is_used & ~samples.is_truncated if config.loss.mask_truncated_completions else is_used
