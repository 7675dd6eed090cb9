"""Warm start of the drafter: the policy answers prompts of coming steps, and each rank learns.

Now and then all ranks continue with the mean of their drafters."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.arrays import to_device
from bubblespec.engine.model import forward_hidden, pack_sequences
from bubblespec.mechanisms.drafter.training import (
    EXAMPLES_PER_UPDATE,
    FINAL_RATE,
    LEARNING_RATE,
    DrafterTraining,
    Example,
    examples_of,
)
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Row

VOCAB_SIZE = 16_384  # token ids that a new drafter can draft
EPOCHS = 8
MERGE_EVERY = 40  # updates of a rank
MAX_STEPS = 256  # whose prompts are answered


def generate(sampler: Sampler, step: int) -> list[Row]:
    """Return this rank's share of drafter.warm_start tokens of responses to coming prompts.

    The nearest steps come first; the last responses are unfinished. Raises StopRequested."""
    config, ranks, engine = sampler.config, sampler.ranks, sampler.engine
    schedule, rollout, rows = sampler.schedule, config.rollout, []
    depth = min(MAX_STEPS, config.run.max_steps - step - 1)
    for groups in [schedule.launch(step).groups, *schedule.upcoming(step, depth)]:
        samples = list(itertools.product(groups, range(rollout.num_generations)))
        rows += [
            Row(group.sample(sample), group.prompt.token_ids, rollout.max_completion_length)
            for group, sample in samples[ranks.rank :: ranks.world_size]
        ]
    wanted, num_tokens = -(-config.drafter.warm_start // ranks.world_size), 0
    engine.reset()
    engine.add(rows)
    with _progress("tokens of responses to learn from", wanted, ranks) as bar:
        while num_tokens < wanted and not engine.is_idle and not ranks.must_stop:
            load = engine.step(sampler.params)[1]
            assert load is not None
            num_tokens += load.tokens - load.prompt_tokens
            bar.update(load.tokens - load.prompt_tokens)
    engine.collect()
    engine.release()
    ranks.barrier_or_stop()
    return [row for row in rows if len(row.tokens)]


def frequent_ids(rows: Sequence[Row], stop_token_ids: Sequence[int], ranks: Ranks) -> np.ndarray:
    """Return the VOCAB_SIZE most frequent tokens of all ranks, with stop tokens, ascending."""
    tokens = np.concatenate([np.array(stop_token_ids, np.int64), *(row.tokens for row in rows)])
    ids, counts = np.unique(np.concatenate(ranks.gather_ragged(tokens)), return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:VOCAB_SIZE]])


@torch.no_grad()
def examples_from(model: PreTrainedModel, rows: Sequence[Row], kernel: str) -> list[Example]:
    """Compute the policy's hidden states of these responses, and return examples with them."""
    examples: list[Example] = []
    for row in rows:
        tokens = np.concatenate((row.prompt, row.tokens[:-1]))
        packing = pack_sequences([len(tokens)], model.device)
        hidden = forward_hidden(model, to_device(tokens, model.device), packing, kernel)
        examples += examples_of(tokens, len(row.prompt), hidden)
    return examples


def train(training: DrafterTraining, examples: list[Example], ranks: Ranks) -> None:
    """Train for EPOCHS at a rate that falls to FINAL_RATE, and keep the latest examples.

    Raises StopRequested."""
    by_length = sorted(examples, key=lambda example: len(example.hidden))  # to pad little
    begins = np.arange(0, len(examples), EXAMPLES_PER_UPDATE)
    order = np.concatenate([training.random.permutation(begins) for _ in range(EPOCHS)])
    total = int(ranks.gather(np.array([len(order)])).max())
    with _progress("updates of the drafter", total, ranks) as bar:
        for number in range(total):
            rate = LEARNING_RATE * (1 - (1 - FINAL_RATE) * number / total)
            training.optimizer.param_groups[0]["lr"] = rate
            if number < len(order):
                training.learn(by_length[order[number] : order[number] + EXAMPLES_PER_UPDATE])
            if number % MERGE_EVERY == 0 or number + 1 == total:
                training.merge(ranks)
                ranks.barrier_or_stop()
            bar.update()
    training.optimizer.param_groups[0]["lr"] = FINAL_RATE * LEARNING_RATE
    for example in examples:
        training.add(example)


def _progress(description: str, total: int, ranks: Ranks) -> tqdm:
    """Return a progress bar, which rank 0 shows on a terminal alone."""
    is_hidden = None if ranks.is_main else True
    return tqdm(desc=description, total=total, disable=is_hidden, leave=False)
