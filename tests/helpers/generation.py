"""Rows to generate, engines for them, and a source of right and wrong drafts."""

from collections.abc import Callable
from functools import partial

import numpy as np

from bubblespec.engine.arrays import packed
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import PAGE
from bubblespec.engine.pages import Pages
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms.batch_invariant import InvariantForward, make_invariant
from bubblespec.mechanisms.tp_tail.shards import ShardedForward
from bubblespec.types import Row, SampleId
from tests.helpers.models import VOCAB

STOP = (5, 11)


def make_runner(
    model,
    num_slots: int,
    max_length: int,
    seed: int,
    *,
    tp=None,
    batch_invariant: bool = False,
    enforce_eager: bool = False,
    memory=None,
    max_num_batched_tokens: int = 2048,
    page_size: int | None = None,
    num_pages: int | None = None,
) -> ModelRunner:
    """Create a runner with a forward of this kind; tp: a group of ranks that compute together;
    page_size: PAGE by default on a GPU, else there are no pages."""
    if page_size is None and num_pages is not None:
        page_size = PAGE
    pages = page_size and Pages.for_rows(num_slots, max_length, page_size, num_pages)
    if batch_invariant:
        make_invariant(model, max_num_batched_tokens)
        forward = InvariantForward(model, enforce_eager=enforce_eager)
    else:
        make = ModelForward if tp is None else partial(ShardedForward, tp=tp)
        forward = make(model, enforce_eager=enforce_eager, memory=memory)
    sizes = {"max_num_batched_tokens": max_num_batched_tokens, "pages": pages}
    return ModelRunner(model, num_slots, max_length, seed, forward=forward, **sizes)


def make_engine(model, num_slots: int, *, seed=0, max_length=100, **options) -> Engine:
    return Engine(make_runner(model, num_slots, max_length, seed, **options))


def make_prompts(count: int, longest: int = 40) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(1, VOCAB, rng.integers(1, longest)).tolist()) for _ in range(count)]


def make_rows(prompts, num_generations: int, max_new_tokens: int = 30) -> list[Row]:
    return [
        Row(SampleId(100 + u, 3, j), p, max_new_tokens, number=u * num_generations + j)
        for u, p in enumerate(prompts)
        for j in range(num_generations)
    ]


def as_dict(rows: list[Row]) -> dict:
    return {(row.id.prompt_id, row.id.sample): (row.tokens.tolist(), row.finish) for row in rows}


class Drafts:
    """A proposer of `draft(row, number of response tokens)` for each row, None for nothing."""

    def __init__(self, draft: Callable[[Row, int], list | np.ndarray | None]):
        self.draft, self.num_draft, self.num_accepted, self.num_gained = draft, 0, 0, 0

    def propose(self, rows, lengths, room, budget, in_flight):
        return packed([self.draft(*of) for of in zip(rows, lengths.tolist(), strict=True)])

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        assert (num_accepted <= num_draft).all() and num_gained.sum() == len(tokens)
        assert (num_accepted <= num_gained).all()
        self.num_draft += num_draft.sum()
        self.num_accepted += num_accepted.sum()
        self.num_gained += len(tokens)


class Drafter(Drafts):
    """Proposes true continuations, each token replaced at random with probability `corrupted`."""

    def __init__(self, wanted: dict, corrupted: float):
        super().__init__(self.continuation)
        self.wanted, self.corrupted, self.rng = wanted, corrupted, np.random.default_rng(3)

    def propose(self, rows, lengths, room, budget, in_flight):
        self.ahead = dict(zip(rows, in_flight.tolist(), strict=True))
        return super().propose(rows, lengths, room, budget, in_flight)

    def continuation(self, row: Row, length: int) -> np.ndarray | None:
        truth = np.array(self.wanted[row.id.prompt_id, row.id.sample][0])[length:]
        draft = np.concatenate((truth, self.rng.integers(1, VOCAB, 3)))
        draft = draft[: self.rng.integers(0, 9) + self.ahead[row]]
        wrong = self.rng.random(len(draft)) < self.corrupted
        draft[wrong] = self.rng.integers(1, VOCAB, wrong.sum())
        return draft if self.rng.random() < 0.8 else None
