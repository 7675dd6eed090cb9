"""The engine with a runner that has texts in place of a model: batches, slots and pages."""

from collections.abc import Callable

import numpy as np
import pytest

from bubblespec.engine.arrays import unpacked
from bubblespec.engine.batch import Batch, Runner, SamplerOutput, SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.pages import Pages
from bubblespec.types import Load, Row, SampleId
from tests.helpers.generation import Drafts

STOP = 9
PARAMS = SamplingParams(stop_token_ids=(STOP,))


class TextRunner(Runner):
    """Each row generates its text. In place of keys and values the cache has tokens, or -1.

    In place of states there are the tokens that they have taken in, and those that wait."""

    def __init__(
        self,
        num_slots: int,
        max_length: int,
        max_num_batched_tokens: int,
        texts: dict[SampleId, list[int]],
        pages: Pages | None = None,
        window: int | None = None,
    ):
        self.window = window
        self.states: list[tuple] = [([], [])] * (num_slots + 1)
        self.num_slots, self.max_length = num_slots, max_length
        self.max_num_batched_tokens, self.texts, self.pages = max_num_batched_tokens, texts, pages
        shape = (num_slots, max_length) if pages is None else (pages.num_pages, pages.page_size)
        self.cache = np.full(shape, -1)
        self.rows: list[Row | None] = [None] * num_slots
        self.calls: list[tuple] = []

    def place(self, slot: int, row: Row) -> None:
        self.calls.append(("place", slot, row.id, row.tokens.tolist()))
        self.rows[slot] = row

    def reset(self) -> None:
        """Nothing is kept."""

    def move(self, source: int, target: int, length: int) -> None:
        self.calls.append(("move", source, target, length))
        if self.pages is not None:
            self.pages.move(source, target)
        else:
            self.cache[target], self.cache[target, :length] = -1, self.cache[source, :length]
        self.rows[target], self.rows[source] = self.rows[source], None
        self.states[target] = self.states[source]

    def keep(self, slot: int) -> None:
        self.states[self.num_slots] = self.states[slot]

    def share(
        self, source: np.ndarray, target: np.ndarray, length: np.ndarray, states: np.ndarray
    ) -> None:
        given = (source.tolist(), target.tolist(), length.tolist())
        assert not set(given[0]) & set(given[1])
        self.calls.append(("share", *given))
        for state, slot in zip(states.tolist(), given[1], strict=True):
            self.states[slot] = self.states[state]
        for source, target, length in zip(*given, strict=True):
            if self.pages is not None:
                source, target, length = self.pages.share(source, target, length)
                if not length:
                    continue
                self.cache[target] = -1
            self.cache[target, :length] = self.cache[source, :length]

    def release(self) -> None:
        self.cache.fill(-1)

    def place_of(self, slot, position) -> tuple:
        if self.pages is None:
            return slot, position
        page, offset = np.divmod(position, self.pages.page_size)
        return self.pages.table[slot, page], offset

    def launch(self, batch: Batch, params) -> Callable[[], SamplerOutput]:
        self.batch = batch
        assert batch.load.tokens == len(batch.tokens) <= self.max_num_batched_tokens
        self.cache[self.place_of(*batch.index)] = batch.tokens
        fed = zip(batch.start.tolist(), batch.count.tolist(), strict=True)
        for slot, (start, count) in enumerate(fed):
            assert (batch.index[1, batch.index[0] == slot] == np.arange(start, start + count)).all()
            known = [*self.rows[slot].prompt, *self.texts[self.rows[slot].id]]
            seen = self.cache[self.place_of(slot, np.arange(start))]
            assert seen.tolist() == known[:start], "attends to its own tokens"
            if self.window is not None and count:
                self.advance(slot, start, batch.tokens[batch.index[0] == slot].tolist())
                assert self.states[slot][0] == known[: len(self.states[slot][0])]
                is_draft = dict(zip(batch.slots.tolist(), batch.num_draft.tolist(), strict=True))
                assert count <= self.window or not is_draft.get(slot)
        tokens: list[int] = []
        drafts = unpacked(batch.draft, batch.num_draft)
        sampled = zip(batch.slots.tolist(), batch.generated.tolist(), drafts, strict=True)
        for slot, generated, draft in sampled:
            padded = self.texts[self.rows[slot].id] + [0] * len(draft)
            tokens += padded[generated : generated + len(draft) + 1]
        drawn = np.array(tokens, np.int64)
        return lambda: SamplerOutput(drawn, -drawn.astype(float))

    def advance(self, slot: int, start: int, fed: list[int]) -> None:
        """Let a state take in what was right of its last window, and feed it one or more."""
        taken, waiting = self.states[slot] if start else ([], [])
        assert 0 <= start - len(taken) <= len(waiting), "a state is never ahead"
        taken = taken + waiting[: start - len(taken)]
        last = max(len(fed) - 1, 0) // self.window * self.window
        self.states[slot] = taken + fed[:last], fed[last:]


class FixedDrafts(Drafts):
    def __init__(self, drafts: dict[SampleId, list[int]]):
        super().__init__(lambda row, length: drafts.get(row.id))
        self.seen = []

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        gained = [of.tolist() for of in unpacked(tokens, num_gained)]
        prompt_ids = [row.id.prompt_id for row in rows]
        self.seen += zip(prompt_ids, gained, num_draft.tolist(), num_accepted.tolist(), strict=True)


def test_batches_equal_hand_made_batches():
    """Two rows of one prompt, a third in the queue, a draft that is half right, a replaced row."""
    ids = [SampleId(prompt_id, 2, sample) for prompt_id, sample in ((1, 0), (1, 1), (5, 0))]
    runner = TextRunner(2, 10, 4, {ids[0]: [4, 3, 2, STOP], ids[1]: [6, 7, 6], ids[2]: [8]})
    engine = Engine(runner)
    assert engine.step(PARAMS) == ([], None)
    rows = [Row(ids[0], (1, 2, 3), 7), Row(ids[1], (1, 2, 3), 3), Row(ids[2], (5, 6), 1)]
    engine.add(rows)

    def step(proposer=None) -> tuple[dict, list[Row]]:
        finished, _ = engine.step(PARAMS, proposer)
        return {
            name: value if name == "load" else value.tolist()
            for name, value in vars(runner.batch).items()
        }, finished

    first, finished = step()
    assert first == {
        "start": [0, 0], "count": [3, 0], "index": [[0, 0, 0], [0, 1, 2]], "tokens": [1, 2, 3],
        "slots": [0], "generated": [0], "num_draft": [0], "draft": [],
        "load": Load(2, 3, 1, 3, 2, 0),
    }  # fmt: skip
    assert finished == []
    assert engine.prefilling() == rows[1:2]
    # Of this draft two tokens fit into the forward, and one is right.
    proposer = FixedDrafts({ids[0]: [3, 5, 1]})
    second, _ = step(proposer)
    assert second == {
        "start": [3, 2], "count": [3, 1], "index": [[0, 0, 0, 1], [3, 4, 5, 2]],
        "tokens": [4, 3, 5, 3], "slots": [0, 1], "generated": [1, 0], "num_draft": [2, 0],
        "draft": [3, 5], "load": Load(2, 4, 1, 9, 0, 2),
    }  # fmt: skip
    assert proposer.seen == [(1, [3, 2], 2, 1), (1, [6], 0, 0)]
    assert engine.length[:2].tolist() == [6, 4] and engine.cached[:2].tolist() == [5, 3]
    placed = [("place", 0, ids[0], []), ("place", 1, ids[1], [])]
    assert runner.calls == [*placed, ("share", [0], [1], [2])]
    _, finished = step()
    assert [(row.id, row.finish, row.tokens.tolist()) for row in finished] == [
        (ids[0], "stop", [4, 3, 2, STOP])
    ]
    assert rows[0].logprob.tolist() == [-4, -3, -2, -STOP]
    assert runner.calls[3:] == [("place", 0, ids[2], [])]
    _, finished = step()
    assert [(row.id, row.finish) for row in finished] == [(ids[1], "length"), (ids[2], "length")]
    assert engine.rows == [] and runner.calls[4:] == []


def check_pages(engine: Engine) -> None:
    """Each row has the pages of its positions; each page is free, or counted for its rows, whose
    tokens are equal up to its end."""
    pages, active, holders = engine.pages, len(engine.rows), {}
    for slot in range(engine.num_slots):
        held = pages.held[slot]
        assert held == 0 if slot >= active else held >= pages.needed(engine.cached[slot])
        assert (pages.table[slot, held:] == pages.num_pages).all()
        for number, page in enumerate(pages.table[slot, :held].tolist()):
            holders.setdefault(page, set()).add((number, slot))
    assert sorted([*holders, *pages._free]) == list(range(pages.num_pages))
    for page, of in holders.items():
        assert pages._num_rows[page] == len(of)
        (end,) = {(number + 1) * pages.page_size for number, _ in of}
        alike = {tuple(engine.tokens[slot, :end].tolist()) for _, slot in of}
        assert len(of) == 1 or len(alike) == 1
        assert len(of) == 1 or all(end < engine.prompt_length[slot] for _, slot in of)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("seed", range(16))
def test_random_schedules_generate_the_given_texts(seed, window):
    """Slots, budgets, drafts, drops and resets at random, without pages, with few and with many.
    In every forward rows attend to their own tokens, and states take in these (`TextRunner`)."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(20, 90, rng.integers(1, 12)).tolist()) for _ in range(5)]
    ids = [SampleId(u, 0, sample) for u in range(len(prompts)) for sample in range(4)]
    texts = {i: [*rng.integers(10, 20, rng.integers(0, 25)).tolist(), STOP] for i in ids}
    num_slots = int(rng.integers(1, 9))
    pages, size = None, int(rng.choice([2, 4, 8]))
    if seed >= 8:
        pages = Pages(num_slots, 40, 40 // size * int(rng.integers(1, num_slots + 1)), size)
    runner = TextRunner(num_slots, 40, int(rng.integers(num_slots, 40)), texts, pages, window)
    engine, rows = Engine(runner), [Row(i, prompts[i.prompt_id], 26) for i in ids]

    def guess(row: Row, length: int) -> np.ndarray | None:
        tokens = np.array(texts[row.id][length : length + rng.integers(0, 8)], np.int64)
        tokens[rng.random(len(tokens)) < 0.2] = 15
        return tokens if rng.random() < 0.7 else None

    class Guesses(Drafts):
        def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
            super().observe(rows, tokens, num_gained, num_draft, num_accepted)
            last = tokens[num_gained.cumsum() - 1]
            assert ((num_gained > num_accepted) | (last == STOP)).all()

    engine.add(rows)
    num_finished = 0
    while not engine.is_idle:
        proposer = Guesses(guess) if rng.random() < 0.7 else None
        limit = int(rng.integers(0, 20)) if rng.random() < 0.5 else None
        num_finished += len(engine.step(PARAMS, proposer, limit)[0])
        if pages is not None:
            check_pages(engine)
        if rng.random() < 0.1 and (waiting := engine.collect()):
            row = waiting[rng.integers(len(waiting))]
            engine.drop(row)
            engine.add([row])
        if rng.random() < 0.05:
            rows_left = engine.collect()
            engine.reset()
            engine.add(rows_left)
    assert num_finished == len(rows) and all(
        row.tokens.tolist() == texts[row.id] and row.finish == "stop" for row in rows
    )


def test_youngest_row_is_preempted_when_pages_run_out():
    """Two rows of six prompt tokens share one of six pages of four positions. The older row goes on
    to its end; the younger one is fed again with its tokens."""
    ids = [SampleId(1, 0, sample) for sample in range(2)]
    texts = {i: [*range(10, 25), STOP] for i in ids}
    pages = Pages(2, 24, 6, 4)
    engine = Engine(TextRunner(2, 24, 30, texts, pages))
    rows = [Row(i, (1, 2, 3, 4, 5, 6), 18) for i in ids]
    engine.add(rows)
    engine.step(PARAMS)
    engine.step(PARAMS)
    assert pages.held[:2].tolist() == [2, 2] and pages.num_free == 3
    assert pages.table[0, 0] == pages.table[1, 0] and pages.table[0, 1] != pages.table[1, 1]
    while not engine.queue:
        engine.step(PARAMS)
        check_pages(engine)
    assert engine.rows == rows[:1] and list(engine.queue) == rows[1:]
    assert 0 < len(rows[1].tokens) < 16
    known = len(rows[1].tokens)
    engine.run([], PARAMS)
    assert all(row.tokens.tolist() == texts[row.id] for row in rows)
    again = ("place", 0, ids[1], texts[ids[1]][:known])
    assert engine.runner.calls[-1] == again and pages.num_free == 6


def test_drafts_leave_the_pages_needed_by_rows():
    """Five pages: two rows with a page each draft to the end of another; then one page is left."""
    ids = [SampleId(prompt_id, 0, 0) for prompt_id in range(2)]
    texts = {i: [*range(10, 25), STOP] for i in ids}
    pages = Pages(2, 20, 5, 4)
    engine = Engine(TextRunner(2, 20, 30, texts, pages))
    engine.add([Row(i, (1 + i.prompt_id, 2), 16) for i in ids])
    engine.step(PARAMS)
    engine.step(PARAMS, FixedDrafts({i: texts[i][1:] for i in ids}))
    assert engine.runner.batch.num_draft.tolist() == [5, 5] and pages.num_free == 1
    engine.step(PARAMS, FixedDrafts({i: texts[i][7:] for i in ids}))
    assert len(engine.rows) == 1 and engine.runner.batch.num_draft.tolist() == [8]


def test_too_few_tokens_or_pages_are_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens = 3 is below num_slots = 4"):
        Engine(TextRunner(4, 10, 3, {}))
    with pytest.raises(ValueError, match="4 pages of 4 positions are too few for a row of 20"):
        Pages(3, 20, 4, 4)
