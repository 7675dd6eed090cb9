"""Rows in slots: the queue in front of them, admission, shared prefills, pages and preemption.

Active rows always occupy slots 0..R-1, so attention reads the cache through a slice and never
gathers. The slot of a finished row is refilled from the queue, or else the last active row moves
into it. Rows with the same prompt share one prefill: the first of them computes the prompt's keys
and values, the others copy them and feed only the last prompt token.

Where keys and values are in pages, rows are admitted while pages last. When pages run out, the
youngest row is preempted: it returns to the head of the queue, and its tokens are fed again later.
They need no verification.

Shape legend: R active rows.
"""

from collections import deque

import numpy as np

from bubblespec.engine.batch import Runner
from bubblespec.types import Row


class Scheduler:
    """The rows of an engine, and what is known of each."""

    def __init__(self, runner: Runner):
        self.runner, self.pages = runner, runner.pages
        self.num_slots, self.max_length = runner.num_slots, runner.max_length
        shape = (self.num_slots, self.max_length)
        self.queue: deque[Row] = deque()  # rows that wait for a slot
        # Active rows, by slot. A row's `tokens` are current after `collect` and once it has left.
        self.rows: list[Row] = []
        # Per slot: tokens[:length] are known, and the first `cached` of them have keys and values.
        self.tokens = np.zeros(shape, np.int64)
        self.length, self.cached, self.prompt_length, self.limit = np.zeros(
            (4, self.num_slots), np.int64
        )
        self.logprob = np.zeros(shape, np.float32)
        self.is_paused = np.zeros(self.num_slots, bool)
        # Forwards in flight: the most and the fewest tokens that they add to each slot's row,
        # unless it ends. They are for the row whose ticket they have; a row gets another one
        # whenever its text is written here, or it pauses.
        self.most, self.fewest, self.ticket = np.zeros((3, self.num_slots), np.int64)
        self.is_written = np.zeros(self.num_slots, bool)  # since the last plan
        self._num_tickets = 0
        # The prompt whose keys and values a slot holds, even after its row has finished; -1: none.
        self.prompt_key = np.full(self.num_slots, -1, np.int64)
        self._prompt_keys: dict[tuple[int, ...], int] = {}
        # A row has the states behind its prompt only until its next forward: `began` is at least
        # where its last window began. Those of one prompt are kept.
        self.began = np.zeros(self.num_slots, np.int64)
        self._kept_key = -1
        self.num_admitted = 0
        # Rows admitted before each slot's row. A preempted row, which waits before all others,
        # becomes the youngest again.
        self._age = np.zeros(self.num_slots, np.int64)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to generate."""
        return not self.rows and not self.queue

    @property
    def lengths(self) -> np.ndarray:
        """Known tokens of each active row, prompt included, int64 [R]."""
        return self.length[: len(self.rows)].copy()

    @property
    def _reach(self) -> np.ndarray:
        """Tokens that each active row has at most once forwards in flight have ended, int64 [R]."""
        return (self.length + self.most)[: len(self.rows)]

    def add(self, rows: list[Row]) -> None:
        """Queue rows, those with one prompt next to each other, so that its prefill is shared.

        Raises ValueError for a row that does not fit, or that has all its tokens."""
        for row in rows:
            prompt, limit = len(row.prompt), row.max_new_tokens
            if not (prompt and limit > 0 and prompt + limit <= self.max_length):
                raise ValueError(
                    f"a prompt of {prompt} and up to {limit} new tokens do not fit max_length = "
                    f"{self.max_length}"
                )
            if (known := len(row.tokens)) >= limit:
                raise ValueError(
                    f"a row with {known} of at most {limit} tokens has none left to generate"
                )
        self.queue.extend(rows)

    def insert(self, rows: list[Row], counts: np.ndarray) -> None:
        """Admit rows into the first slots of an empty engine, their prefix taken as cached.

        counts: int64 [rows], known tokens of each whose keys and values the caller writes."""
        self.add(rows)
        while self.queue:
            self._append_next()
        self.cached[: len(rows)] = counts
        if self.pages is not None:
            self.pages.grow(counts)

    def drop(self, row: Row) -> None:
        """Take out an unfinished row; it keeps its tokens, and continues after them if re-added."""
        if row in self.queue:
            self.queue.remove(row)
            return
        slot = self.rows.index(row)
        self._read_results(slot)
        self._refill(slot)

    def resume(self, row: Row, ids: np.ndarray) -> None:
        """Append tokens that are not sampled to a paused row, which samples again behind them.

        Tokens are cut to the row's limit; without room for another the row ends with "length"."""
        room = row.max_new_tokens - len(row.tokens)
        ids, row.finish = ids[:room], "length" if len(ids) >= room else None
        unknown = np.full(len(ids), np.nan, np.float32)
        row.tokens = np.concatenate((row.tokens, ids))
        row.logprob = np.concatenate((row.logprob, unknown))
        if row in self.rows:
            self._write_row(self.rows.index(row))
        if row.finish is not None:
            self.drop(row)

    def collect(self) -> list[Row]:
        """Write their tokens so far into the rows in slots; return these and the queued rows."""
        return [self._read_results(slot) for slot in range(len(self.rows))] + list(self.queue)

    def prefilling(self) -> list[Row]:
        """Return active rows whose prompt lacks keys and values, apart from its last token's."""
        return [self.rows[slot] for slot in self._prefilling()]

    def reset(self) -> None:
        """Forget all rows, and all keys and values; needed whenever the weights have changed."""
        self.queue.clear()
        self.rows.clear()
        self.prompt_key.fill(-1)
        self._prompt_keys.clear()
        self._kept_key = -1
        if self.pages is not None:
            self.pages.clear()
        self.runner.reset()

    def release(self) -> None:
        """Forget all rows, and free the memory of keys and values until the next forward."""
        self.reset()
        self.runner.release()

    def _can_admit(self) -> bool:
        """Whether a row waits and there are pages for it, and one more for each active row."""
        # The pages for active rows keep a preempted row from being preempted again soon.
        if not self.queue or self.pages is None or not self.rows:
            return bool(self.queue)
        row = self.queue[0]
        needed = self.pages.needed(len(row.prompt) + len(row.tokens)) + len(self.rows)
        return bool(needed + self.pages.lacking(self._reach) <= self.pages.num_free)

    def _admit(self) -> None:
        """Admit queued rows while slots and pages last."""
        while len(self.rows) < self.num_slots and self._can_admit():
            self._append_next()

    def _append_next(self) -> None:
        self.rows.append(self.queue.popleft())
        self._place(len(self.rows) - 1)

    def _reclaim_pages(self) -> None:
        """Make room for a forward: pages of rejected drafts first, then of the youngest rows."""
        if self.pages is None:
            return
        if self.pages.lacking(self._reach) > self.pages.num_free:
            for slot, length in enumerate(self._reach.tolist()):
                self.pages.truncate(slot, length)
        while self.pages.lacking(self._reach) > self.pages.num_free:
            slot = int(self._age[: len(self.rows)].argmax())
            row = self._read_results(slot)
            self._free_pages(slot)
            self._close(slot)
            self.queue.appendleft(row)

    def _prefilling(self) -> np.ndarray:
        active = len(self.rows)
        return np.flatnonzero(self.cached[:active] < self.prompt_length[:active] - 1)

    def _share_prefills(self) -> None:
        """Give prefilling rows the keys and values of slots that hold their prompt whole.

        Where rows have states, of slots that have these, too, or whose prompt's are kept."""
        whole = np.flatnonzero(self.cached >= self.prompt_length - 1)[::-1]
        states = whole
        if self.runner.window is not None:
            is_kept = self.prompt_key[whole] == self._kept_key
            states = np.where(self._has_states(whole), whole, self.num_slots)
            whole, states = (of[is_kept | (states < self.num_slots)] for of in (whole, states))
        pairs = zip(whole.tolist(), states.tolist(), strict=True)
        first_with = dict(zip(self.prompt_key[whole].tolist(), pairs, strict=True))
        slots = self._prefilling()
        found = [first_with.get(key, (-1, -1)) for key in self.prompt_key[slots].tolist()]
        source, states = np.array(found, np.int64).reshape(-1, 2).T
        if len(slots := slots[source >= 0]):
            self.cached[slots] = self.prompt_length[slots] - 1
            states = states[source >= 0]
            self.runner.share(source[source >= 0], slots, self.cached[slots], states)

    def _has_states(self, slots: np.ndarray) -> np.ndarray:
        """Whether slots have the states behind their prompts, but for its last token."""
        return self.began[slots] < self.prompt_length[slots]

    def _keep_prompt(self) -> None:
        """Keep the states behind the prompt of the row that waits first, while a slot has them."""
        if self.runner.window is None or not self.queue:
            return
        key = self._prompt_keys.get(self.queue[0].prompt, -1)
        if key in (-1, self._kept_key):
            return
        active = np.arange(len(self.rows))
        is_whole = self.cached[active] >= self.prompt_length[active] - 1
        found = active[is_whole & self._has_states(active) & (self.prompt_key[active] == key)]
        if len(found):
            self._kept_key = key
            self.runner.keep(int(found[0]))

    def _place(self, slot: int) -> None:
        """Write a new row into its slot, whose keys and values stay if its prompt is the same."""
        row = self.rows[slot]
        prompt_key = self._prompt_keys.setdefault(row.prompt, len(self._prompt_keys))
        length = len(row.prompt)
        has_prompt = self.prompt_key[slot] == prompt_key and self.runner.window is None
        self.cached[slot] = min(self.cached[slot], length - 1) if has_prompt else 0
        self.tokens[slot, :length] = row.prompt
        self.prompt_length[slot], self.limit[slot] = length, row.max_new_tokens
        self.prompt_key[slot], self.began[slot] = prompt_key, 0
        self._write_row(slot)
        self._age[slot] = self.num_admitted
        self.num_admitted += 1
        self.runner.place(slot, row)

    def _write_row(self, slot: int) -> None:
        """Write a row's tokens so far, and whether it is paused, into its slot."""
        row, begin = self.rows[slot], self.prompt_length[slot]
        span = slice(begin, begin + len(row.tokens))
        self.tokens[slot, span] = row.tokens
        self.logprob[slot, span] = row.logprob if len(row.logprob) else 0.0
        self.length[slot] = span.stop
        self.is_paused[slot] = row.finish is not None
        self.is_written[slot] = True
        self._renew(slot)

    def _renew(self, slot: int) -> None:
        """Let forwards in flight no longer count for a slot's row."""
        self._num_tickets += 1
        self.ticket[slot] = self._num_tickets
        self.most[slot] = self.fewest[slot] = 0
        self.cached[slot] = min(self.cached[slot], self.length[slot] - 1)

    def _read_results(self, slot: int) -> Row:
        row = self.rows[slot]
        begin, end = self.prompt_length[slot], self.length[slot]
        row.tokens = self.tokens[slot, begin:end].copy()
        row.logprob = self.logprob[slot, begin:end].copy()
        return row

    def _refill(self, slot: int) -> None:
        """Admit a queued row into the slot of a row that leaves, or close the slot."""
        self._free_pages(slot)
        if self._can_admit():
            self.rows[slot] = self.queue.popleft()
            self._place(slot)
        else:
            self._close(slot)

    def _free_pages(self, slot: int) -> None:
        if self.pages is None:
            return
        self.length[slot], self.cached[slot], self.most[slot], self.prompt_key[slot] = 0, 0, 0, -1
        self.pages.truncate(slot)

    def _close(self, slot: int) -> None:
        """Move the last active row into the slot."""
        moved, last = self.rows.pop(), len(self.rows)
        if slot == last:
            return
        self.rows[slot] = moved
        self.runner.move(last, int(slot), int(self.cached[last] + self.most[last]))
        known = self.tokens, self.logprob, self.length, self.cached, self.is_paused
        limits = self.prompt_length, self.limit, self.prompt_key, self._age, self.began
        in_flight = self.most, self.fewest, self.ticket, self.is_written
        for array in (*known, *limits, *in_flight):
            array[slot] = array[last]
        self.prompt_key[last] = -1
