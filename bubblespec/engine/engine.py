"""Continuous-batching generation as a stepper: add rows, run one packed forward at a time, drop
rows, stop at any point.

What a row's tokens are depends on the weights, the prompt and the row's noise key alone: not on the
other rows, the order of admission, the chunk size, the number of slots or the drafts.
"""

from collections import deque
from collections.abc import Collection

import numpy as np

from bubblespec.engine.sampling import SamplingParams
from bubblespec.engine.scheduler import Proposer, Runner, Scheduler
from bubblespec.records import Load
from bubblespec.types import Row


class Engine:
    """A scheduler and the runner of what it plans."""

    def __init__(self, runner: Runner):
        """Raises ValueError if a token of each slot does not fit into one forward."""
        self.runner, self.scheduler = runner, Scheduler(runner)
        self.num_slots, self.max_length, self.max_batch_tokens = (
            runner.num_slots,
            runner.max_length,
            runner.max_batch_tokens,
        )
        self.num_forwards = 0

    @property
    def rows(self) -> list[Row]:
        """Active rows, by slot. Their tokens are in them once they have finished; see `collect`."""
        return self.scheduler.rows

    @property
    def queue(self) -> deque[Row]:
        """Rows that wait for a slot."""
        return self.scheduler.queue

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to generate."""
        return not self.rows and not self.queue

    @property
    def lengths(self) -> np.ndarray:
        """Known tokens of each active row, prompt included, int64 [R]."""
        return self.scheduler.length[: len(self.rows)].copy()

    def add(self, rows: list[Row]) -> None:
        """Queue rows; those with the same prompt should be adjacent, so that they share its
        prefill. Raises ValueError for a row that does not fit, or has all its tokens."""
        self.scheduler.add(rows)

    def drop(self, row: Row) -> None:
        """Take a row out before it has finished; it keeps its tokens so far, and goes on after them
        if it is added again."""
        self.scheduler.drop(row)

    def collect(self) -> list[Row]:
        """The rows in slots, with their tokens so far in them, and those in the queue as they are.
        All stay where they are."""
        return self.scheduler.collect()

    def decoding(self) -> list[Row]:
        """Rows whose prompt and all of whose tokens but the last are in the cache."""
        return self.scheduler.decoding()

    def prefilling(self) -> list[Row]:
        """Active rows whose prompt is not whole in the cache yet; its last token is fed when they
        first sample."""
        return self.scheduler.prefilling()

    def reset(self, staying: Collection[Row] = ()) -> None:
        """Forget all rows, and all cached keys and values. Needed whenever the weights have
        changed.

        Rows that are `staying` must be decoding. They go on over keys and values that older weights
        have computed: what they then generate is a sample of no policy, and good for nothing but
        drafts.
        """
        self.scheduler.reset(staying)

    def release(self) -> None:
        """Forget all rows, and give the memory of keys and values back until the next forward."""
        self.reset()
        self.runner.release()

    def run(
        self, rows: list[Row], params: SamplingParams, proposer: Proposer | None = None
    ) -> list[Row]:
        """Generate all rows to their end; returns them as given."""
        self.add(rows)
        while not self.is_idle:
            self.step(params, proposer)
        return rows

    def step(
        self,
        params: SamplingParams,
        proposer: Proposer | None = None,
        max_prefill_tokens: int | None = None,
    ) -> tuple[list[Row], Load | None]:
        """One forward: admit, feed every row's next tokens, sample where a row's known tokens end.
        Returns the finished rows, and what the forward had to do, or None without rows.

        proposer: where drafts come from; max_prefill_tokens: most tokens fed of rows that do not
        decode yet, by default max_batch_tokens.
        """
        batch = self.scheduler.schedule(proposer, max_prefill_tokens)
        if batch is None:
            return [], None
        result = self.runner.forward(batch, params)
        self.num_forwards += 1
        return self.scheduler.update(batch, result, params.stop_token_ids, proposer), batch.load
