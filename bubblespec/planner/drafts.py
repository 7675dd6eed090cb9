"""Which responses of coming steps are drafted, in which order, and at what price.

A draft saves nothing by itself: a forward is saved only if no row needs it. So the longest
responses are worth drafting together or not at all, and only if their drafts hold. Their number is
the best of 0, 1, 2, ... by the expected seconds of the coming rollout.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import NamedTuple

import numpy as np

from bubblespec.planner.costs import CostModel, play
from bubblespec.planner.lengths import AcceptanceRates, LengthForecast, LengthModel
from bubblespec.planner.prices import Prices
from bubblespec.types import Draft, Group, SampleId

MAX_LOOKAHEAD = 8
RETRY_STEPS = 8  # interval of drafting steps where even the freshest drafts are refused
MIN_ACCEPTED_SHARE = 0.2  # older drafts, of which less is accepted, are not made
# Co-scheduled drafts must save this many times their cost: both are estimates, and the best of many
# counts is taken. The cost is not shared: all ranks wait for the one that drafts.
MIN_RETURN = 2.0
MAX_COUNTS = 9  # numbers of drafts of one step that are compared
# Cost of co-scheduled drafts, relative to the rollout, while no draft of the run has been verified.
UNVERIFIED_SHARE = 0.15


class DraftRequest(NamedTuple):
    """A piece of idle work that a rank could do."""

    key: Hashable
    """Key of the piece in its task; for a draft its `SampleId`."""
    saves_s: float
    """Predicted seconds saved of the run's wall time; 0 where nothing is known yet."""
    costs_s: float
    """Predicted seconds of work; free where the rank waits."""
    co_scheduled: bool
    """Whether the job is worth slowing down a rank's own rows."""
    prompt: tuple[int, ...] = ()
    """Prompt of a draft."""


class DraftPlan(NamedTuple):
    """The drafts to make during a rollout."""

    jobs: Iterator[DraftRequest]
    """The most urgent first: co-scheduled ones, then of deferred groups, then by slack."""
    worth: float
    """Seconds that co-scheduled drafts save for each of their own; inf where nothing is known."""


def draft_value(
    coming: LengthForecast,
    cost: CostModel,
    rates: AcceptanceRates,
    prices: Prices,
    *,
    num_ranks: int,
    num_slots: int,
    max_share: float = math.inf,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what drafting the rows of a coming step to their ends is worth, by row [S].

    Whether it pays co-scheduled, bool; seconds saved in the step's rollout, and seconds of the rank
    that completes the draft, float64. The best number of drafts maximises the seconds saved minus
    those of drafting, which are at most the `max_share` of the rollout.
    """
    missing = np.maximum(coming.expected - coming.drafted, 0.0)
    is_open = missing > 0.0
    costs_s = np.where(is_open, missing * prices.drafted_s + prices.begun_s, 0.0)
    order = np.argsort(-np.where(is_open, coming.expected, -1.0), kind="stable")
    num_open = int(is_open.sum())
    counts = np.geomspace(1, num_open + 1, min(num_open + 1, MAX_COUNTS)).round() - 1
    counts = np.unique(counts.astype(np.int64))
    rows, number = coming.take(order), np.arange(len(coming))
    is_made = number < counts[:, None]
    drafted = np.where(is_made, np.inf, rows.drafted)
    played_s = play(rows, cost, num_slots, rates, number % num_ranks, drafted)
    verified = np.where(is_made, rows.expected, rows.drafted).sum(axis=1) / num_ranks
    seconds = prices.forward * played_s.max(axis=-1).mean(axis=-1) + prices.verified_s * verified
    spent_s = np.append(0.0, np.cumsum(costs_s[order]))[counts]
    chosen = int((seconds + MIN_RETURN * spent_s).argmin())
    chosen = min(chosen, int((spent_s <= max_share * seconds[0]).sum()) - 1)
    best = int(counts[chosen])
    pays, saves_s = np.zeros(len(coming), bool), np.zeros(len(coming))
    pays[order[:best]] = True
    # Further drafts are for idle ranks; each gets an equal share of their joint saving.
    for drafts, saved_s in (
        (order[:best], seconds[0] - seconds[chosen]),
        (order[best:num_open], seconds[chosen] - seconds[-1]),
    ):
        saves_s[drafts] = max(float(saved_s), 0.0) / max(len(drafts), 1)
    return pays, saves_s, costs_s


def plan_drafts(
    batches: list[list[Group]],
    num_generations: int,
    get_draft: Callable[[SampleId], Draft | None],
    lengths: LengthModel,
    *,
    cost: CostModel | None,
    rates: AcceptanceRates,
    prices: Prices | None,
    forwards_per_step: float,
    num_ranks: int,
    num_slots: int,
    oldest_verified: int | None = MAX_LOOKAHEAD,
    planning: str = "by_cost",
    deferred: Collection[tuple[int, int]] = (),
) -> DraftPlan:
    """Return which drafts to make, and in which order.

    Slack is the number of forwards until a response's step minus its expected tokens. So a long
    response is begun many steps before its own, and the nearer of equally long ones comes
    first.

    batches: groups of the coming steps, nearest first; cost, prices: None where nothing is known
    yet; oldest_verified: largest age, in updates, of drafts verified so far, None for none;
    co-scheduled drafts are at most one update older; deferred: names of groups; planning: see
    `SpeculativeConfig`.
    """
    found: list[tuple[SampleId, tuple[int, ...]]] = []
    columns = [np.empty((5, 0))]
    for ahead, groups in enumerate(batches):
        ids = [group.sample(number) for group in groups for number in range(num_generations)]
        drafts = [get_draft(sample) for sample in ids]
        is_open = np.array([draft is None or not draft.is_finished for draft in drafts], bool)
        if not is_open.any():
            continue
        rows = lengths.predict(groups, num_generations, drafts)
        slack = ahead * forwards_per_step - (rows.expected - rows.drafted)
        may_pay = planning == "by_cost" and ahead <= (oldest_verified or 0)
        value: tuple[np.ndarray, ...] = (*np.full((3, len(ids)), planning == "always"),)
        if cost is not None and prices is not None and may_pay:
            value = draft_value(
                rows,
                cost,
                rates,
                prices,
                num_ranks=num_ranks,
                num_slots=num_slots,
                max_share=UNVERIFIED_SHARE if oldest_verified is None else math.inf,
            )
        prompts = [group.prompt.token_ids for group in groups for _ in range(num_generations)]
        is_deferred = np.array([sample[:2] in deferred for sample in ids])
        of_batch = np.array((*value, is_deferred, slack), np.float64)
        columns.append(of_batch[:, is_open])
        pairs = zip(ids, prompts, is_open.tolist(), strict=True)
        found += [(sample, prompt) for sample, prompt, is_open in pairs if is_open]
    pays, saves_s, costs_s, is_deferred, slack = np.concatenate(columns, axis=1)
    order = np.lexsort((slack, -is_deferred, -pays)).tolist()
    jobs = (
        DraftRequest(found[i][0], float(saves_s[i]), float(costs_s[i]), bool(pays[i]), found[i][1])
        for i in order
    )
    is_weighed = planning != "always" and pays.any()
    worth = float(pays @ saves_s / (pays @ costs_s)) if is_weighed else math.inf
    return DraftPlan(jobs, worth)


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
