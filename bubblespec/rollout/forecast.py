"""What the rows of a rollout are expected to need, from what every rank knows: drafts, earlier
epochs, recent lengths.

So all ranks place rows and move them alike.
"""

from dataclasses import replace

import numpy as np

from bubblespec.draft.store import DraftStore
from bubblespec.idle.draft_planning import Outlook, expected_length
from bubblespec.idle.rehearsal import NORMAL_QUANTILE
from bubblespec.idle.speculation import Speculation
from bubblespec.rollout.balance import Expected
from bubblespec.rollout.board import RankState
from bubblespec.rollout.moves import Move, Unfinished, expected_left, plan_moves
from bubblespec.rollout.standing import Standing
from bubblespec.types import Launch

OVERHEAD_TICKS = 2.0  # from a decision to the first forward of a row that has moved
MOST_MOVED_TOKENS = 1 << 17  # in a tick


def forecast(launch: Launch, speculation: Speculation, store: DraftStore | None = None) -> Expected:
    """Of the rows of a rollout that is about to begin. store: where their drafts are, by default
    those of coming steps."""
    store = speculation.store if store is None else store
    num_generations, outlook = launch.num_generations, speculation.outlook
    prompt_tokens = np.array([len(group.prompt.token_ids) for group in launch.groups])
    guesses, margin = outlook.guess(prompt_tokens)
    margins = np.full(len(guesses), margin)
    for number, group in enumerate(launch.groups):
        if known := speculation.history.lengths(group.prompt.uid):
            guesses[number], margins[number] = np.mean(known), NORMAL_QUANTILE * np.std(known)
    drafts = [store.get(name) for name in launch.ids]
    totals = np.repeat(guesses, num_generations)
    drafted = np.array([0 if draft is None else len(draft.tokens) for draft in drafts], np.float64)
    for place, draft in enumerate(drafts):
        if draft is not None:
            totals[place] = expected_length(draft, totals[place], outlook)
    is_known = np.array([draft is not None and draft.is_finished for draft in drafts])
    return Expected(
        tokens=np.maximum(totals - drafted, 0.0),
        margins=np.where(is_known, 0.0, np.repeat(margins, num_generations)),
        draft_tokens=drafted,
        groups=np.repeat(np.arange(len(launch.groups)), num_generations),
        prompt_tokens=np.repeat(prompt_tokens, num_generations),
    )


def up_to_cut(expected: Expected, launch: Launch) -> Expected:
    """What the rows are expected to need of it until the rollout is over: none gets longer than the
    last that is trained on."""
    longest = (expected.tokens + expected.draft_tokens).reshape(len(launch.groups), -1).max(axis=1)
    cut = np.sort(longest)[launch.num_trained - 1]
    draft_tokens = np.minimum(expected.draft_tokens, cut)
    return replace(
        expected, tokens=np.minimum(expected.tokens, cut - draft_tokens), draft_tokens=draft_tokens
    )


def admit_first(places: list[int], launch: Launch, expected: Expected) -> list[int]:
    """The order in which a rank should admit its rows where not all of them are trained on.

    First come those of the groups that are expected to be among the shortest; of each other group
    one, which has to outlast them to be out; and then the rest, of which most need not be begun.
    places: in the order of a rollout that trains on all.
    """
    totals = (expected.tokens + expected.draft_tokens).reshape(len(launch.groups), -1)
    is_trained = np.zeros(len(launch.groups), bool)
    is_trained[np.argsort(totals.max(axis=1), kind="stable")[: launch.num_trained]] = True
    seen: set[int] = set()
    first, probes, rest = [], [], []
    for place in places:
        group = place // launch.num_generations
        (first if is_trained[group] else rest if group in seen else probes).append(place)
        seen.add(group)
    return first + probes + rest


def unfinished_rows(
    standing: Standing, expected: Expected, outlook: Outlook
) -> tuple[np.ndarray, Unfinished]:
    """The rows that are not done as of the last tick, of all ranks, and their places in the launch,
    int64 [N]."""
    places = np.flatnonzero(standing.told >= 0)
    places = places[
        np.argsort(standing.told[places] == 0, kind="stable")
    ]  # those that wait come after those in slots
    so_far, totals = standing.told[places], expected.tokens + expected.draft_tokens
    left = expected_left(so_far, totals[places], expected.margins[places], outlook)
    return places, Unfinished(standing.owners[places], so_far, left, expected.prompt_tokens[places])


class Mover:
    """Decides on moves within one rollout; the same on all ranks."""

    def __init__(self, expected: Expected, speculation: Speculation, num_slots: int):
        """expected: see `forecast`. Needs a shared cost."""
        self.expected, self.outlook, self.cost = (
            expected,
            speculation.outlook,
            speculation.shared_cost,
        )
        self.num_slots, self.overhead_s = num_slots, OVERHEAD_TICKS * speculation.board.interval_s

    def plan(self, standing: Standing, states: list[RankState]) -> list[Move]:
        """See `TakeOver`."""
        if all(not state.is_done for state in states):
            return []
        places, rows = unfinished_rows(standing, self.expected, self.outlook)
        options = {
            "num_ranks": len(states),
            "num_slots": self.num_slots,
            "overhead_s": self.overhead_s,
        }
        moves = plan_moves(rows, self.cost, **options)
        moved = np.cumsum([rows.so_far[move.row] for move in moves])
        return [
            move._replace(row=int(places[move.row]))
            for move, total in zip(moves, moved.tolist(), strict=True)
            if total <= MOST_MOVED_TOKENS
        ]
