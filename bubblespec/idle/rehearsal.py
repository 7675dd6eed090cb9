"""Which responses of a coming step to draft: its rollout, played through with more and fewer of
them drafted.

A draft saves nothing by itself. The first tokens of a response share their forwards with the whole
batch; a forward is saved only if no row needs it, so the longest responses are worth drafting
together or not at all, and only if their drafts hold. So the rollout is played through with the
longest 1, 2, 4, ... responses drafted to their ends, over a number of scenarios that agree with
what is known: how long responses get, and when drafts differ from them first.

A pure function of what all ranks know, so that they plan alike.
"""

from dataclasses import dataclass

import numpy as np

from bubblespec.records import POSITIONS

NUM_SCENARIOS = 16
NORMAL_QUANTILE = (
    1.28  # standard deviations above the mean, where the share 0.9 lies below (PROBE_QUANTILE)
)
# of the logarithm of what a length is off its guess, what the samples of a prompt have in common
SHARED_VARIANCE = 0.5
TYPICAL_WINDOW = 8.0  # draft tokens that a row is verified by in a forward
# Drafts beside a rank's own rows must win more than they cost by so much.
CAUTION = 1.5
NUM_COUNTS = 10
# [tokens tried, accepted] of drafts up to their first difference, and [gained, given by the draft]
# after it: what is believed before acceptance has been measured.
PRIOR_BEFORE, PRIOR_AFTER = np.array([100.0, 99.99]), np.array([100.0, 10.0])
POOLED_TOKENS = 20.0  # of all positions together, that count at each of them


@dataclass(frozen=True)
class Coming:
    """The S responses of a coming step."""

    totals: np.ndarray
    """float64 [S], tokens that each is expected to get."""
    margins: np.ndarray
    """float64 [S], how many more than that it easily gets, see `Outlook.guess`."""
    drafted: np.ndarray
    """float64 [S], tokens of its draft."""
    is_whole: np.ndarray
    """bool [S], the draft is finished."""
    groups: np.ndarray
    """int64 [S], number of the prompt, from 0."""
    prompt_tokens: np.ndarray
    """int64 [S]."""


@dataclass(frozen=True)
class Worth:
    """What whole drafts of S responses are worth."""

    pays: np.ndarray
    """bool [S], to be drafted even beside own rows."""
    saves_s: np.ndarray
    """float64 [S], of the step's rollout."""
    costs_s: np.ndarray
    """float64 [S], of the rank that makes what is missing beside other rows."""


def rehearse(
    rows: Coming, cost: np.ndarray, seen: np.ndarray, *, num_ranks: int, num_slots: int
) -> Worth:
    """What to draft of a step. cost: coefficients of a `CostModel`, float64 [5]; seen: of drafts so
    far, see `chances`."""
    p_before, p_after = chances(seen)
    forward_s, row_s, token_s, wide_row_s, position_s = cost.tolist()
    random = np.random.default_rng(0)
    lengths = np.maximum(
        rows.totals * length_factors(rows.margins, rows.totals, rows.groups, random), rows.drafted
    )
    lengths[:, rows.is_whole] = rows.drafted[rows.is_whole]
    right_lengths = first_mismatches(p_before, random.exponential(size=lengths.shape))
    decode_s = row_s + token_s + position_s * (rows.prompt_tokens + rows.totals / 2)
    costs_s = np.maximum(lengths - rows.drafted, 0.0).mean(axis=0) * decode_s

    order = np.argsort(-np.where(rows.is_whole, -1.0, rows.totals), kind="stable")
    num_open = int((~rows.is_whole).sum())
    counts = np.unique(
        np.concatenate(([0], np.geomspace(1, max(num_open, 1), NUM_COUNTS).astype(np.int64)))
    )
    counts = counts[counts <= num_open]
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))

    def played(drafted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forwards and seconds of each row with so many tokens drafted, float64 [scenarios, S], in
        the order of places."""
        right = np.minimum(right_lengths, drafted)
        decoded = lengths - drafted + (1.0 - p_after) * (drafted - right)
        verifications = right / TYPICAL_WINDOW
        seconds = (
            decoded * decode_s
            + (lengths - decoded) * token_s
            + verifications * (row_s + wide_row_s)
        )
        return (decoded + verifications)[:, order], seconds[:, order]

    made, left = played(lengths), played(np.minimum(rows.drafted, lengths))
    ranks = np.empty(len(order), np.int64)
    ranks[np.argsort(-rows.totals, kind="stable")] = np.arange(len(order)) % num_ranks
    ends_s = []
    for rank in range(min(num_ranks, len(order))):
        own = np.flatnonzero(ranks[order] == rank)
        num_made = np.searchsorted(own, counts)
        (longest, total), (_, seconds) = (
            _first_and_rest(made[i][:, own], left[i][:, own], num_made) for i in (0, 1)
        )
        ends_s.append(forward_s * np.maximum(longest, total / num_slots) + seconds)
    rollout_s = np.max(ends_s, axis=0).mean(axis=0)  # [counts]
    spent_s = CAUTION * np.concatenate(([0.0], np.cumsum(costs_s[order])))[counts] / num_ranks
    best = int((rollout_s + spent_s).argmin())
    pays = place < counts[best]
    # Beyond the best number drafts are for ranks that wait; what they save is shared among them, as
    # it is among the best ones.
    saves_s = np.zeros(len(order))
    if counts[best]:
        saves_s[pays] = (rollout_s[0] - rollout_s[best]) / counts[best]
    others = ~pays & ~rows.is_whole
    if others.any():
        saves_s[others] = max(rollout_s[best] - rollout_s[-1], 0.0) / others.sum()
    return Worth(pays, saves_s, costs_s)


def _first_and_rest(
    first: np.ndarray, rest: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of the first n values of `first` and all but the first n of `rest` together the largest and
    the sum, for each n in counts, float64 [scenarios, counts]. first, rest: float64 [scenarios,
    values], not negative."""
    before, after = np.pad(first, ((0, 0), (1, 0))), np.pad(rest, ((0, 0), (0, 1)))[:, ::-1]
    largest = np.maximum(
        np.maximum.accumulate(before, axis=1), np.maximum.accumulate(after, axis=1)[:, ::-1]
    )
    total = before.cumsum(axis=1) + after.cumsum(axis=1)[:, ::-1]
    return largest[:, counts], total[:, counts]


def chances(seen: np.ndarray) -> tuple[np.ndarray, float]:
    """Chance that a draft token before the first mismatch is accepted, float64 [positions] by where
    it is, and the share of the tokens after it that the draft still gives.

    seen: float64 [positions + 1, 2], `Acceptance.before_divergence` and, last, `after_divergence`,
    summed over rollouts.
    """
    before, after = seen[:-1], seen[-1] + PRIOR_AFTER
    tried, accepted = before.sum(axis=0) + PRIOR_BEFORE
    there = before + POOLED_TOKENS * np.array([1.0, accepted / tried])
    return there[:, 1] / there[:, 0], float(after[1] / after[0])


def first_mismatches(p_before: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Tokens of drafts before their first mismatch. draws: float64, standard exponential: what a draft
    survives of the hazard
        -log(p) of its tokens, one after the other."""
    hazards = -np.log(np.minimum(p_before, 1.0 - 1e-9))
    edges = np.array([*POSITIONS, 2 * POSITIONS[-1]], np.float64)
    reached = np.concatenate(([0.0], np.cumsum(hazards * np.diff(edges))))
    return np.floor(np.interp(draws, reached, edges))


def length_factors(
    margins: np.ndarray, means: np.ndarray, groups: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """By how much lengths may be off what is expected, float64 [scenarios, S]: lognormal, with mean
    1.

    margins, means: float64 [S]; groups: int64 [S], samples with the same number have a part of it
    in common.
    """
    variance = np.log1p((margins / NORMAL_QUANTILE / np.maximum(means, 1.0)) ** 2)
    noise = random.standard_normal((2, NUM_SCENARIOS, len(groups)))
    noise = SHARED_VARIANCE**0.5 * noise[0][:, groups] + (1 - SHARED_VARIANCE) ** 0.5 * noise[1]
    return np.exp(np.sqrt(variance) * noise - variance / 2)
