"""Proposers, their rows, and forwards of these: `forward` plays the engine, which accepts what
agrees with a given truth."""

import numpy as np

from bubblespec.draft.proposer import Proposer, make_proposer
from bubblespec.draft.sources import DraftSource, Proposals, TextMatches
from bubblespec.draft.store import TextStore
from bubblespec.engine.arrays import packed, unpacked
from bubblespec.planner.costs import CostModel
from bubblespec.types import Draft, Row, SampleId
from tests.helpers.clocks import Clock
from tests.helpers.planning import cost_of
from tests.helpers.suffix import texts_of

STEP = 5


def cost(a: float = 1.0, b: float = 1e-6, c: float = 1e-6) -> CostModel:
    return cost_of((a, b, c, 0.0, 0.0))


def make(method: str = "bubble+suffix", always=True, costs=None, history=None) -> Proposer:
    options = {"has_drafts": "bubble" in method, "always": always, "clock": Clock()}
    parts = method.split("+"), history or TextStore(1000), costs or cost()
    proposer = make_proposer(*parts, **options)
    proposer.begin()
    return proposer


def drafts_and(source: DraftSource) -> Proposer:
    proposer = Proposer(
        [TextMatches(TextStore(0), False), source], cost(), always=True, clock=Clock()
    )
    proposer.begin()
    return proposer


def row(
    sample: int = 0, draw_index: int = STEP, prompt_id: int = 70, tokens=(), number=None
) -> Row:
    number, tokens = sample if number is None else number, np.array(tokens, np.int64)
    return Row(SampleId(prompt_id, draw_index, sample), (1, 2, 3), 500, tokens, number=number)


def draft(tokens, version: int = 4) -> Draft:
    return Draft(np.array(tokens, np.int32), True, version)


def forward(
    proposer: Proposer, rows: list[Row], truths: list, room: int = 3, budget: int = 4000
) -> list[list[int]]:
    """Return each row's proposal in a forward, in which it gains accepted tokens and one more."""
    lengths = np.array([len(r.tokens) for r in rows])
    tokens, counts = proposer.propose(rows, lengths, np.full(len(rows), room), budget)
    proposed = [of.tolist() for of in unpacked(tokens, counts)]
    gained, accepted = [], []
    for r, truth, tokens in zip(rows, truths, proposed, strict=True):
        rest = list(truth)[len(r.tokens) :]
        right = 0
        while right < min(len(tokens), len(rest) - 1) and tokens[right] == rest[right]:
            right += 1
        accepted.append(right)
        gained.append(np.array(rest[: right + 1], np.int64))
        r.tokens = np.concatenate((r.tokens, gained[-1]))
    proposer.observe(list(rows), *packed(gained), counts, np.array(accepted))
    return proposed


def with_guess(guess: list[int], tokens) -> "tuple[Proposer, Row, Guesses]":
    one = row()
    guesses = Guesses({one.id: guess})
    guesses.chance = 1.0
    proposer = drafts_and(guesses)
    one.draft = draft(tokens)
    proposer.track(one, STEP)
    return proposer, one, guesses


class Guesses(DraftSource):
    """A guess at the whole response of some samples; notes calls."""

    kinds = (("guess",),)

    def __init__(self, guesses: dict[SampleId, list[int]]):
        self.guesses = guesses
        self.begins, self.asked, self.gained = 0, [], {}

    def begin(self, tracked) -> None:
        super().begin(tracked)
        self.begins += 1
        self.gained.clear()

    def track(self, number) -> None:
        row = self.tracked.rows[number]
        self.gained[row.id] = row.tokens.tolist()

    def propose(self, numbers, limits) -> Proposals:
        names = [self.tracked.rows[number].id for number in numbers]
        known = [self.gained[name] for name in names]
        self.asked.append(names)
        assert (limits > 0).all() and known == texts_of(self.tracked.texts, numbers)
        places = zip(names, map(len, known), limits, strict=True)
        rest = [self.guesses.get(name, [])[n : n + limit] for name, n, limit in places]
        tokens, counts = packed([np.array(tokens, np.int64) for tokens in rest])
        return Proposals(tokens, counts.cumsum() - counts, counts, np.zeros_like(counts))

    def observe(self, numbers, tokens, counts) -> None:
        for number, gained in zip(numbers, unpacked(tokens, counts), strict=True):
            self.gained[self.tracked.rows[number].id] += gained.tolist()
