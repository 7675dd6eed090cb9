"""The rollout of a step: every rank generates its share of the prompts, and all ranks get all samples with their rewards.

A step's samples are in canonical order on every rank: by prompt in the batch, then by generation. Nothing after this point
depends on which rank generated what, or when.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bubblespec.distributed import Ranks
from bubblespec.engine.generator import Generator
from bubblespec.engine.sampling import SamplingParams
from bubblespec.forward_log import ForwardLog
from bubblespec.records import Prompt, Row, SampleId
from bubblespec.timeline import Event, forward_kind, note


@dataclass
class Samples:
    """S = prompts x generations responses in canonical order.

    tokens, logprob, full_logprob: one array a sample (see `Row`); is_truncated: bool [S], cut off by the length limit;
    rewards: float64 [S, functions], NaN where a function does not apply.
    """

    prompts: list[Prompt]
    num_generations: int
    tokens: list[np.ndarray]
    logprob: list[np.ndarray]
    full_logprob: list[np.ndarray]
    is_truncated: np.ndarray
    rewards: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of sample `index`."""
        return self.prompts[index // self.num_generations]

    @property
    def lengths(self) -> np.ndarray:
        """Response tokens of each sample, int64 [samples]."""
        return np.array([len(t) for t in self.tokens])

    def of_prompts(self, numbers: list[int]) -> "Samples":
        """The groups of some of the prompts, in the order given."""
        rows = [n * self.num_generations + j for n in numbers for j in range(self.num_generations)]
        return Samples(
            [self.prompts[n] for n in numbers],
            self.num_generations,
            *([values[i] for i in rows] for values in (self.tokens, self.logprob, self.full_logprob)),
            self.is_truncated[rows],
            self.rewards[rows],
        )

    def __add__(self, other: "Samples") -> "Samples":
        """The other's prompts after these."""
        return Samples(
            self.prompts + other.prompts,
            self.num_generations,
            self.tokens + other.tokens,
            self.logprob + other.logprob,
            self.full_logprob + other.full_logprob,
            np.concatenate((self.is_truncated, other.is_truncated)),
            np.concatenate((self.rewards, other.rewards)),
        )


def assign_prompts(num_prompts: int, world_size: int) -> list[list[int]]:
    """Which prompts of the batch each rank generates."""
    return [list(range(rank, num_prompts, world_size)) for rank in range(world_size)]


def owner_ranks(num_prompts: int, world_size: int) -> list[int]:
    """The rank that generates each prompt of the batch."""
    rank_of = {number: rank for rank, share in enumerate(assign_prompts(num_prompts, world_size)) for number in share}
    return [rank_of[number] for number in range(num_prompts)]


def make_rows(prompts: list[Prompt], step: int, num_generations: int, max_new_tokens: int) -> list[Row]:
    """The rows to generate for a step's prompts, those of a prompt adjacent."""
    return [Row(SampleId(p.uid, step, j), p.token_ids, max_new_tokens) for p in prompts for j in range(num_generations)]


def generate(
    engine: Generator,
    rows: list[Row],
    params: SamplingParams,
    ranks: Ranks,
    on_finished: Callable[[Row], None] | None = None,
    events: list[Event] | None = None,
    log: ForwardLog | None = None,
) -> None:
    """Run this rank's rows to their end on the weights as they are now, unless it is told to stop: then they are left as they
    are. `on_finished` is called with each row as it finishes; the forwards are noted in `events`
    and in `log`."""
    engine.reset()
    engine.add(rows)
    num_left = len(rows)
    if log is not None:
        log.begin()
    while not engine.is_idle and not ranks.must_stop:
        begin = ranks.clock.perf_counter()
        finished, load = engine.step(params)
        if events is not None:
            note(events, forward_kind(len(rows), 0, load), begin, ranks.clock.perf_counter())
        if log is not None:
            log.add(begin, ranks.clock.perf_counter(), load, num_left)
        num_left -= len(finished)
        for row in finished if on_finished is not None else ():
            on_finished(row)


def gather_samples(prompts: list[Prompt], num_generations: int, rows: list[Row], rewards: np.ndarray, ranks: Ranks) -> Samples:
    """All ranks' rows in canonical order, on every rank. `prompts` is the whole batch, `rows` this rank's."""
    by_rank = assign_prompts(len(prompts), ranks.world_size)
    lengths = ranks.gather_ragged(np.array([len(row.tokens) for row in rows], np.int64))
    truncated = ranks.gather_ragged(np.array([row.finish == "length" for row in rows], np.uint8))
    tokens = ranks.gather_ragged(_concatenate([row.tokens.astype(np.int32) for row in rows], np.int32))
    logprob = ranks.gather_ragged(_concatenate([row.logprob for row in rows], np.float32))
    full_logprob = ranks.gather_ragged(_concatenate([row.full_logprob for row in rows], np.float32))
    all_rewards = ranks.gather_ragged(rewards.ravel())
    total = len(prompts) * num_generations
    samples = Samples(
        prompts,
        num_generations,
        [None] * total,
        [None] * total,
        [None] * total,
        np.zeros(total, bool),
        np.zeros((total, rewards.shape[1])),
    )
    for rank, prompt_numbers in enumerate(by_rank):
        where = [n * num_generations + j for n in prompt_numbers for j in range(num_generations)]
        cuts = np.cumsum(lengths[rank])[:-1]
        for flat, target in ((tokens, samples.tokens), (logprob, samples.logprob), (full_logprob, samples.full_logprob)):
            for index, part in zip(where, np.split(flat[rank], cuts), strict=False):
                target[index] = part
        samples.is_truncated[where] = truncated[rank].astype(bool)
        samples.rewards[where] = all_rewards[rank].reshape(len(where), rewards.shape[1])
    return samples


def digest(samples: Samples) -> str:
    """SHA-256 over all (prompt uid, sample index, token ids), ordered by uid and sample: equal digests are equal tokens."""
    sha = hashlib.sha256()
    keyed = [(samples.prompt_of(i).uid, i % samples.num_generations, i) for i in range(len(samples))]
    for uid, sample, i in sorted(keyed):
        sha.update(np.array([uid, sample, len(samples.tokens[i])], "<i8").tobytes())
        sha.update(samples.tokens[i].astype("<i4").tobytes())
    return sha.hexdigest()


def _concatenate(arrays: list[np.ndarray], dtype) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
