"""Out of memory in a micro-batch: split it and go on.

A backward pass that runs out of memory may have added part of its gradient already, so the rank
starts its update again, with micro-batches of at most half the tokens. The others wait for it in
the reduction. Sums are taken in another order then: the gradient is the same but for rounding, as
with a smaller optim.max_tokens_per_microbatch from the start.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from tqdm import tqdm

from bubblespec.dist.ranks import Ranks
from bubblespec.errors import InputError
from bubblespec.learn.microbatch import Microbatch, make_microbatch
from bubblespec.types import Samples

Result = TypeVar("Result")


@dataclass
class TokenBudget:
    """The size of this rank's micro-batches."""

    max_tokens: int
    """Most tokens in one: optim.max_tokens_per_microbatch, or less once memory has run out."""


def split(batch: Microbatch, samples: Samples, max_tokens: int) -> list[Microbatch]:
    """Micro-batches of whole neighbouring sequences with at most `max_tokens`, longer ones alone;
    `batch` itself if it is one."""
    cuts, total = [0], 0
    for number, length in enumerate(batch.sequence_lengths):
        if total and total + length > max_tokens:
            cuts.append(number)
            total = 0
        total += length
    if len(cuts) == 1:
        return [batch]
    ends = np.concatenate(([0], np.cumsum(batch.lengths.cpu().numpy())))
    parts = []
    for first, last in pairwise([*cuts, len(batch.order)]):
        part = make_microbatch(samples, batch.order[first:last], batch.input_ids.device)
        tokens = slice(ends[first], ends[last])
        part.old = None if batch.old is None else batch.old[tokens]
        part.reference = None if batch.reference is None else batch.reference[tokens]
        parts.append(part)
    return parts


def run_within_memory(
    work: Callable[[Microbatch], Result],
    microbatches: list[Microbatch],
    *,
    restart: Callable[[], None],
    samples: Samples,
    budget: TokenBudget,
    ranks: Ranks,
) -> list[Result]:
    """work(batch) for every micro-batch. Where memory runs out, `microbatches` is split in place,
    `restart` takes back what was done, and all is done again. Raises InputError if one sequence
    alone does not fit."""
    while True:
        results, batch = [], None
        try:
            for batch in microbatches:
                results.append(work(batch))
            return results
        except torch.OutOfMemoryError:
            failed = batch
        # Here and not above, where the exception still holds the tensors of the pass that failed.
        del results
        restart()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        num_tokens = sum(failed.sequence_lengths)
        if len(failed.order) == 1:
            raise InputError(
                f"rollout.max_completion_length: one response of {num_tokens} tokens with its prompt needs more memory than "
                "training has; lower it or optim.max_logits_per_chunk, or set model.gradient_checkpointing=true"
            )
        budget.max_tokens = num_tokens // 2
        tqdm.write(
            f"warning: rank {ranks.rank}: out of memory in a micro-batch of {num_tokens} tokens; going on with at most "
            f"{budget.max_tokens}. Lower optim.max_tokens_per_microbatch to that, as every such split costs time",
            file=sys.stderr,
        )
        microbatches[:] = [
            part for whole in microbatches for part in split(whole, samples, budget.max_tokens)
        ]
