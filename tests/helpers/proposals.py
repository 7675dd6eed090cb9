"""Proposals made by hand, and a stand-in for the engine that verifies them."""

import numpy as np

from bubblespec.draft.proposer import Proposer
from bubblespec.engine.ragged import packed, unpacked
from bubblespec.planner.costs import CostModel
from bubblespec.types import Draft, Row, SampleId

STEP = 5


def cost(a: float = 1.0, b: float = 1e-6, c: float = 1e-6) -> CostModel:
    parameters = np.zeros_like(CostModel().parameters)
    parameters[:3] = a, b, c
    return CostModel.from_parameters(parameters)


def row(sample: int = 0, visit: int = STEP, uid: int = 70, tokens=()) -> Row:
    return Row(SampleId(uid, visit, sample), (1, 2, 3), 500, np.array(tokens, np.int64))


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
