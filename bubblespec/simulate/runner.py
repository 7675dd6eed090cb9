"""The generation engine without a model: it knows what each row will say, and each forward takes the time that a cost model says.

Everything but the forward itself is the real `Generator`: queue, slots, shared prefills, budgets, drafts and their rollback. A
draft token is accepted if it is the one that the row says there, which is what the coupled rule does.
"""

from collections.abc import Callable

import numpy as np
import torch

from bubblespec.engine.generator import Generator, _ragged
from bubblespec.records import Load, Row
from bubblespec.simulate.world import World
from bubblespec.speculate.proposer import RowSpeculator

NO_TOKEN = -2  # stands behind the end of a text: no draft has it
Text = Callable[[Row, np.ndarray], np.ndarray]


class _NoModel:
    device = torch.device("cpu")

    def get_output_embeddings(self) -> None:
        return None


class SimulatedGenerator(Generator):
    """text(row, tokens so far): all that a row will have said at its end, int [L], beginning with those tokens; asked for when
    the row comes into a slot, and for the rows that `reset` keeps. cost.seconds(load): of a forward."""

    def __init__(self, world: World, rank: int, num_slots: int, max_length: int, max_batch_tokens: int, cost, text: Text):
        super().__init__(_NoModel(), num_slots, max_length, seed=0, max_batch_tokens=max_batch_tokens)
        self.world, self.rank, self.cost, self.text = world, rank, cost, text
        self.said = np.full(
            (num_slots, max_length + 1), NO_TOKEN, np.int32
        )  # a slot's prompt and text, in the places of `tokens`
        self.end = np.zeros(num_slots, np.int64)  # of the text in `said`
        # Noise keys are not made, so there are none to move.
        self.per_slot = (*(array for array in self.per_slot if array is not self.stream_key), self.said, self.end)

    def reset(self, kept=()) -> None:
        super().reset(kept)
        for slot in range(len(self.rows)):  # they go on under newer weights
            self._ask(slot)

    def _place(self, slot: int, row: Row) -> None:
        super()._place(slot, row)
        self._ask(slot)

    def _ask(self, slot: int) -> None:
        begin, length, limit = (int(array[slot]) for array in (self.prompt_length, self.length, self.limit))
        text = self.text(self.rows[slot], self.tokens[slot, begin:length])[:limit]
        self.end[slot] = begin + len(text)
        self.said[slot, begin : begin + len(text)] = text
        self.said[slot, begin + len(text)] = NO_TOKEN

    def step(self) -> list[Row]:
        if self.speculator is None and self.world.cores is None:
            self._skip()
        return super().step()

    def _skip(self) -> None:
        """At once all forwards in which every row gets one more token and none ends: the same, sooner."""
        active = len(self.rows)
        if active == 0 or (self.queue and active < self.cache.num_slots):
            return
        if (self.cached[:active] != self.length[:active] - 1).any():
            return
        begin = self.length[:active].copy()
        count = int((self.end[:active] - begin).min()) - 1
        positions = int(begin.sum())
        for i in range(count):
            self.world.advance(self.rank, self.cost.seconds(Load(active, active, 0, positions + i * active, 0, 0)))
        for slot in range(active if count > 0 else 0):
            self.tokens[slot, begin[slot] : begin[slot] + count] = self.said[slot, begin[slot] : begin[slot] + count]
        if count > 0:
            self.num_forwards += count
            self.length[:active] += count
            self.cached[:active] += count

    def _forward(self, count: np.ndarray, slots: np.ndarray, num_draft: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.world.compute(self.rank, self.cost.seconds(self.load))
        length = self.length[slots]
        if not self.load.draft_tokens:
            return np.zeros_like(slots), self.said[slots, length].astype(np.int64), np.zeros((2, len(slots)))
        row, offset = _ragged(num_draft + 1)
        place = slots[row], np.minimum(length[row] + offset, self.end[slots[row]])
        token = self.said[place].astype(np.int64)
        # The place after a draft holds an old token or none: it counts as wrong, whatever that is.
        is_right = (token == self.tokens[slots[row], length[row] + offset]) & (offset < num_draft[row])
        wrong_at = np.where(is_right, len(token), offset)
        return np.minimum.reduceat(wrong_at, np.cumsum(num_draft + 1) - (num_draft + 1)), token, np.zeros((2, len(token)))


class SimulatedSpeculator(RowSpeculator):
    """Proposals take virtual time: propose_seconds(rows), for all rows that are looked at in a forward. With a pause none are."""

    def __init__(self, *arguments, propose_seconds: Callable[[int], float] | None = None, **options):
        super().__init__(*arguments, **options)
        self._propose_seconds, self._due_s = propose_seconds, 0.0

    def propose(self, rows, lengths, room, budget):
        if self._propose_seconds is not None:
            self._due_s = self._propose_seconds(len(rows))
        return super().propose(rows, lengths, room, budget)

    def _candidate(self, row, state, length, longest):
        if self._due_s:  # within what the speculator times
            self.clock.sleep(self._due_s)
            self._due_s = 0.0
        return super()._candidate(row, state, length, longest)
