"""Which responses of coming steps are drafted, in which order, and at what price.

A draft saves nothing by itself: a forward is saved only if no row needs it. So the longest
responses are worth drafting together or not at all, and only if their drafts hold. Their number is
the best of 0, 1, 2, ... by the expected seconds of the coming rollout.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bubblespec.planner.costs import CostModel, seconds_of_course, time_points
from bubblespec.planner.jobs import Job
from bubblespec.planner.lengths import LengthModel
from bubblespec.planner.rows import TYPICAL_WINDOW, AcceptanceRates, Rows, forwards_survival
from bubblespec.types import Draft, Group, SampleId

MAX_LOOKAHEAD = 8
RETRY_STEPS = 8  # interval of drafting steps where even the freshest drafts are refused
MIN_ACCEPTED_SHARE = 0.2  # older drafts, of which less is accepted, are not made
# Co-scheduled drafts must save this many times their cost: both are estimates, and the best of many
# counts is taken.
MIN_RETURN = 1.25


class DraftValue(NamedTuple):
    """Value of finished drafts of S responses."""

    pays: np.ndarray
    """bool [S], whether the draft is worth co-scheduling."""
    saves_s: np.ndarray
    """float64 [S], seconds saved in the step's rollout."""
    costs_s: np.ndarray
    """float64 [S], seconds of the rank that completes the draft."""


def draft_value(
    coming: Rows, cost: CostModel, rates: AcceptanceRates, *, num_ranks: int, num_slots: int
) -> DraftValue:
    """Return the value of drafting the rows of a coming step to their ends.

    The best number of drafts maximises the seconds saved in the rollout minus those of drafting.
    """
    _, row_s, token_s, _, kv_s = cost.coefficients.tolist()
    missing = np.maximum(coming.expected - coming.drafted, 0.0)
    is_open = missing > 0.0
    decode_s = row_s + token_s + kv_s * (coming.prompt_tokens + coming.expected / 2)
    fed = coming.prompt_tokens + coming.drafted  # an unfinished draft is prefilled again
    costs_s = np.where(is_open, missing * decode_s + token_s * fed, 0.0)
    order = np.argsort(-np.where(is_open, coming.expected, -1.0), kind="stable")
    num_open = int(is_open.sum())
    seconds = _seconds_by_count(coming.take(order), cost, rates, num_ranks, num_slots)
    spent_s = np.append(0.0, np.cumsum(costs_s[order])) / num_ranks
    best = int((seconds + MIN_RETURN * spent_s)[: num_open + 1].argmin())
    pays, saves_s = np.zeros(len(coming), bool), np.zeros(len(coming))
    pays[order[:best]] = True
    # Further drafts are for idle ranks; each gets an equal share of their joint saving.
    for chosen, saved_s in (
        (order[:best], seconds[0] - seconds[best]),
        (order[best:num_open], seconds[best] - seconds[num_open]),
    ):
        saves_s[chosen] = max(float(saved_s), 0.0) / max(len(chosen), 1)
    return DraftValue(pays, saves_s, costs_s)


def _seconds_by_count(
    rows: Rows, cost: CostModel, rates: AcceptanceRates, num_ranks: int, num_slots: int
) -> np.ndarray:
    """Return expected seconds of the slowest rank with the first k rows drafted, float64 [S + 1].

    Rows are dealt to ranks round-robin, longest first."""
    points, width = time_points(rows, num_slots)
    whole = replace(rows, spread=0.0 * rows.spread, drafted=rows.expected)
    drafted, undrafted = (forwards_survival(of, rates, points) for of in (whole, rows))
    # Behind a mismatch the row is as uncertain as without a draft.
    right = rates.accepted(rows.expected)[:, None]
    verified = np.minimum(TYPICAL_WINDOW * points, points + (1.0 - 1.0 / TYPICAL_WINDOW) * right)
    holds = right / np.maximum(rows.expected, 1.0)[:, None]
    drafted = holds * drafted + (1.0 - holds) * forwards_survival(rows, rates, verified)
    token_s = float(cost.coefficients[2])
    context = float((rows.prompt_tokens + rows.expected).mean())
    rank_of = np.empty(len(rows), np.int64)
    rank_of[np.argsort(-rows.expected, kind="stable")] = np.arange(len(rows)) % num_ranks
    slowest = np.zeros(len(rows) + 1)
    for rank in range(min(num_ranks, len(rows))):
        own = np.flatnonzero(rank_of == rank)
        active = _first_and_rest(drafted[own], undrafted[own])
        logs = [np.log1p(-np.minimum(of[own], 1.0 - 1e-12)) for of in (drafted, undrafted)]
        course = (active, np.exp(_first_and_rest(*logs)), width)
        verified = _first_and_rest(rows.expected[own, None], rows.drafted[own, None])[:, 0]
        ends_s = seconds_of_course(*course, cost, num_slots, (0.0, context)) + token_s * verified
        slowest = np.maximum(slowest, ends_s[np.searchsorted(own, np.arange(len(rows) + 1))])
    return slowest


def _first_and_rest(first: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Return sums of the first k rows of `first` and all but the first k of `rest`, for each k.

    float64 [rows + 1, ...]."""
    nothing = np.zeros((1, *first.shape[1:]))
    before = np.concatenate((nothing, np.cumsum(first, axis=0)))
    behind = np.concatenate((np.cumsum(rest[::-1], axis=0)[::-1], nothing))
    return before + behind


def plan_drafts(
    batches: list[list[Group]],
    num_generations: int,
    get_draft: Callable[[SampleId], Draft | None],
    lengths: LengthModel,
    *,
    cost: CostModel | None,
    rates: AcceptanceRates,
    forwards_per_step: float,
    num_ranks: int,
    num_slots: int,
    oldest_verified: int = MAX_LOOKAHEAD,
    planning: str = "by_cost",
    deferred: Collection[tuple[int, int]] = (),
) -> list[Job]:
    """Return the drafts to make: co-scheduled, then of deferred groups, then by increasing slack.

    Slack is the number of forwards until a response's step minus its expected tokens. So a long
    response is begun many steps before its own, and the nearer of equally long ones comes
    first.

    batches: groups of the coming steps, nearest first; cost: None where nothing is known yet;
    oldest_verified: largest age, in updates, of drafts verified so far; co-scheduled drafts are at
    most one update older; deferred: names of groups; planning: see `SpeculativeConfig`.
    """
    planned: list[tuple[tuple, Job]] = []
    for ahead, groups in enumerate(batches):
        ids = [group.sample(number) for group in groups for number in range(num_generations)]
        drafts = [get_draft(sample) for sample in ids]
        is_open = np.array([draft is None or not draft.is_finished for draft in drafts], bool)
        if not is_open.any():
            continue
        rows = lengths.predict(groups, num_generations, drafts)
        slack = ahead * forwards_per_step - (rows.expected - rows.drafted)
        may_pay = planning != "idle_only" and ahead <= oldest_verified
        value = DraftValue(*np.zeros((3, len(ids))))
        if planning == "always":
            value = DraftValue(*np.ones((3, len(ids))))
        elif cost is not None and may_pay:
            value = draft_value(rows, cost, rates, num_ranks=num_ranks, num_slots=num_slots)
        for row in np.flatnonzero(is_open).tolist():
            prompt = groups[row // num_generations].prompt.token_ids
            seconds = (float(value.saves_s[row]), float(value.costs_s[row]))
            job = Job(ids[row], *seconds, bool(value.pays[row]), prompt=prompt)
            is_deferred = ids[row][:2] in deferred
            planned.append(((not job.co_scheduled, not is_deferred, float(slack[row])), job))
    return [job for _, job in sorted(planned, key=lambda entry: entry[0])]


def choose_lookahead(
    step: int, *, steps_left: int, steps_stored: float, accepted: dict[int, float]
) -> int:
    """Return how many steps to draft ahead of `step`, by room and by acceptance of old drafts.

    steps_stored: number of steps whose responses fit into the store; accepted: share of accepted
    draft tokens, by age in updates.
    """
    too_old = [age - 1 for age, share in accepted.items() if share < MIN_ACCEPTED_SHARE and age > 0]
    depth = min(MAX_LOOKAHEAD, int(steps_stored), steps_left, *too_old)
    return max(depth, int(steps_left > 0 and steps_stored >= 1 and step % RETRY_STEPS == 0))
