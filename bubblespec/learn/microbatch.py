"""What a rank trains on in one forward and backward: minibatches of whole groups, balanced over
ranks, packed without padding."""

from dataclasses import dataclass

import numpy as np
import torch

from bubblespec.config import Config
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.packing import to_device
from bubblespec.learn.losses import common_factor, local_weights
from bubblespec.types import SampleId, Samples


@dataclass
class Microbatch:
    """B packed sequences, prompt and response each, on the device: N tokens fed, of which M predict
    a response token."""

    order: list[int]
    """Each sequence's place among the samples, [B]."""
    lengths: torch.Tensor
    """Response tokens of each, int64 [B]."""
    input_ids: torch.Tensor
    """Int64 [N]."""
    sequence_lengths: list[int]
    """Tokens fed of each, [B]."""
    predicts: torch.Tensor
    """Where in `input_ids` the response tokens are predicted, int64 [M]."""
    target: torch.Tensor
    """The response tokens, int64 [M]."""
    generated: torch.Tensor
    """Their log-probabilities as the generator has them, float [M]."""
    ids: list[SampleId]
    """The sequences' names, [B]."""
    old: torch.Tensor | None = None
    """Their log-probabilities under the old policy, float [M], once known."""
    reference: torch.Tensor | None = None
    """Their log-probabilities under the reference, float [M], once known."""


def plan_microbatches(
    lengths: np.ndarray, world_size: int, max_tokens: int
) -> list[list[list[int]]]:
    """Sample indices by rank and micro-batch. lengths: int64 [S], tokens (0 = not trained on).

    Longest first to the rank with the least work so far (linear cost in tokens), then, again
    longest first, into the first micro-batch with room. A pure function of the lengths, so equal
    tokens give equal micro-batches.
    """
    load = np.zeros(world_size)
    per_rank: list[list[int]] = [[] for _ in range(world_size)]
    for index in np.argsort(-lengths, kind="stable"):
        if lengths[index] == 0:
            break
        rank = int(load.argmin())
        per_rank[rank].append(int(index))
        load[rank] += lengths[index]
    return [_first_fit(indices, lengths, max_tokens) for indices in per_rank]


def _first_fit(indices: list[int], lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Each sample into the first micro-batch with room, found by descending a tree of the most room
    below each node: looking through all micro-batches would take time quadratic in the number of
    samples."""
    leaves = 1 << max(len(indices) - 1, 0).bit_length()
    # Node 1 is the root, node n has the children 2n and 2n + 1, and the leaves stand for
    # micro-batches.
    room = [max_tokens] * (2 * leaves)
    microbatches: list[list[int]] = [[] for _ in indices]
    for index in indices:
        needed = min(
            lengths[index], max_tokens
        )  # a sample that is too long has a micro-batch to itself
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= needed else 2 * node + 1
        microbatches[node - leaves].append(index)
        room[node] -= needed
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [microbatch for microbatch in microbatches if microbatch]


def make_microbatch(samples: Samples, order: list[int], device: torch.device) -> Microbatch:
    """Of the samples at these places."""
    prompts, tokens = (
        [samples.prompt_of(i).token_ids for i in order],
        [samples.tokens[i] for i in order],
    )
    generated, ids = [samples.full_logprob[i] for i in order], [samples.ids[i] for i in order]
    return pack_responses(prompts, tokens, generated, ids=ids, order=order, device=device)


def pack_responses(
    prompts: list[tuple[int, ...]],
    tokens: list[np.ndarray],
    generated: list[np.ndarray],
    *,
    ids: list[SampleId],
    order: list[int],
    device: torch.device,
) -> Microbatch:
    """Each sequence is its prompt and its response without the last token, which predicts nothing.
    generated: the tokens' log-probabilities as the generator has them; ids, order: see
    `Microbatch`."""
    fed = np.concatenate(
        [np.concatenate((p, t[:-1])) for p, t in zip(prompts, tokens, strict=True)]
    )
    sequence_lengths = [len(p) + len(t) - 1 for p, t in zip(prompts, tokens, strict=True)]
    ends = np.cumsum(sequence_lengths)
    predicts = np.concatenate(
        [np.arange(end - len(t), end) for end, t in zip(ends, tokens, strict=True)]
    )
    return Microbatch(
        order=order,
        lengths=to_device(np.array([len(t) for t in tokens]), device),
        input_ids=to_device(fed.astype(np.int64), device),
        sequence_lengths=sequence_lengths,
        predicts=to_device(predicts, device),
        target=to_device(np.concatenate(tokens).astype(np.int64), device),
        generated=to_device(np.concatenate(generated), device),
        ids=ids,
    )


def make_minibatches(
    samples: Samples, has_gradient: np.ndarray, *, config: Config, ranks: Ranks, max_tokens: int
) -> tuple[list[list[Microbatch]], np.ndarray, list[float]]:
    """This rank's micro-batches of every minibatch; the weight of each sample's tokens, float64
    [S], and by what the gradient of each minibatch is to be scaled: with streamed gradients the
    factor that its samples have in common, else 1.

    Minibatches are whole groups, in the order of the batch, whatever the number of ranks. Each is
    normalised by its own counts, as if it were the whole batch of its update.
    """
    loss, generations = config.loss, samples.num_generations
    lengths, is_used = samples.lengths, is_in_loss(samples, config)
    sequence_lengths = lengths + np.array(
        [len(samples.prompt_of(i).token_ids) for i in range(len(samples))]
    )
    minibatches, factors, weights = [], [], local_weights(loss.loss_type, lengths, is_used)
    for groups in np.array_split(np.arange(len(samples.groups)), loss.num_minibatches):
        members = (groups[:, None] * generations + np.arange(generations)).ravel()
        limit = config.rollout.max_completion_length
        factor = common_factor(loss.loss_type, lengths[members], is_used[members], limit)
        if (
            not config.optim.stream_gradients
        ):  # what is streamed is computed before the factor is known
            weights[members], factor = factor * weights[members], 1.0
        factors.append(factor)
        to_train = np.zeros_like(sequence_lengths)
        to_train[members] = np.where(has_gradient, sequence_lengths, 0)[members]
        plan = plan_microbatches(to_train, ranks.world_size, max_tokens)
        minibatches.append(
            [make_microbatch(samples, order, ranks.device) for order in plan[ranks.rank]]
        )
    return minibatches, weights, factors


def is_in_loss(samples: Samples, config: Config) -> np.ndarray:
    """Which samples are in the loss, bool [S]."""
    return (
        ~samples.is_truncated
        if config.loss.mask_truncated_completions
        else np.ones(len(samples), bool)
    )
