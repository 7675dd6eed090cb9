"""Which responses to draft first, and which are worth slowing down a rank's own rows for.

First come those with the least slack: the forwards that the rollouts until their step will have,
minus the tokens they are expected to need. So a long response is begun many steps before its own,
and of equally long ones the nearest comes first. How long a response gets is guessed from its own
draft so far, its siblings' drafts, its prompt's responses in earlier epochs, and else from the
length of the prompt; in the last case one of the samples goes first, as a probe.

Which of them pay is found by playing their step's rollout through (`rehearse`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bubblespec.draft.store import DraftStore
from bubblespec.draft.suffix import History
from bubblespec.idle.rehearsal import NORMAL_QUANTILE, Coming, Worth
from bubblespec.types import Draft, Group, Row, SampleId

PROBE_QUANTILE = (
    0.9  # the first sample of a prompt of which nothing is known is taken to be this long
)
# What has more slack than so many rollouts can wait: fresher weights draft it better.
PATIENCE = 1.0


@dataclass(frozen=True)
class Item:
    """One response to draft."""

    id: SampleId
    prompt: tuple[int, ...]
    steps_ahead: int
    """How many steps before its own it is; 1 is the next step."""
    pays: bool = True
    """Whether it is worth slowing down a rank's own rows for."""
    holder: int = -1
    """See `Draft`."""
    saves_s: float = 0.0
    """Seconds that the whole draft is expected to save its step; 0 where nothing is known yet."""
    costs_s: float = 0.0
    """Seconds that a rank is expected to take to make what is missing of it."""


class Outlook:
    """Lengths of recent responses, and what they say about those to come. The same on every
    rank."""

    def __init__(self, num_kept: int = 4096):
        self.num_kept = num_kept
        self.seen = np.empty(
            (0, 2), np.int64
        )  # tokens of the prompt and of the response, latest last

    def learn(self, prompt_lengths: np.ndarray, lengths: np.ndarray) -> None:
        """Take in responses: tokens of their prompts and of themselves, int64 [responses]. The
        oldest are forgotten."""
        self.seen = np.concatenate((self.seen, np.stack((prompt_lengths, lengths), axis=1)))[
            -self.num_kept :
        ]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the responses seen, int64, latest last."""
        return self.seen[:, 1]

    def guess(self, prompt_lengths: np.ndarray) -> tuple[np.ndarray, float]:
        """Expected length of a response to prompts of these lengths, by a straight line through
        what was seen, float64 [prompts]; and how much longer than that it easily gets (the share
        PROBE_QUANTILE does not)."""
        if len(self.seen) == 0:
            return np.ones(len(prompt_lengths)), 0.0
        x, y = self.seen.T.astype(np.float64)
        slope = ((x - x.mean()) * (y - y.mean())).mean() / max(x.var(), 1e-9)
        line = np.maximum(y.mean() + slope * (prompt_lengths - x.mean()), 1.0)
        return line, max(
            float(np.quantile(y - y.mean() - slope * (x - x.mean()), PROBE_QUANTILE)), 0.0
        )

    def total(self, so_far: int) -> float:
        """Expected length of a response that has `so_far` tokens and goes on; twice that if none
        has been so long."""
        longer = self.lengths[self.lengths > so_far]
        return float(longer.mean()) if len(longer) else 2.0 * so_far


def plan_items(
    batches: list[list[Group]],
    num_generations: int,
    store: DraftStore,
    history: History,
    *,
    outlook: Outlook,
    forwards_per_step: float,
    worth: Callable[[Coming], Worth] | None = None,
) -> list[Item]:
    """What is left to draft, least slack first. The samples of a prompt keep together where they
    can.

    batches: of the coming steps, nearest first; worth: what drafts are worth in a step, see
    `rehearse`; None where nothing is known yet.
    """
    planned = []
    for ahead, groups in enumerate(batches):
        coming, drafts, totals = look_ahead(groups, num_generations, store, history, outlook)
        slack = ahead * forwards_per_step - (totals - coming.drafted)
        holders = np.array([-1 if draft is None else draft.holder for draft in drafts], np.int64)
        is_due = (holders >= 0) | (slack < PATIENCE * forwards_per_step)  # what is begun goes on
        is_open, num_samples = ~coming.is_whole, len(drafts)
        pays, saves_s, costs_s = (
            np.zeros(num_samples, bool),
            np.zeros(num_samples),
            np.zeros(num_samples),
        )
        if worth is not None and (is_open & is_due).any():
            found = worth(coming)
            pays, saves_s, costs_s = found.pays & is_due, found.saves_s, found.costs_s
        for place in np.flatnonzero(is_open).tolist():
            group, sample = groups[place // num_generations], place % num_generations
            item = Item(
                group.sample(sample),
                group.prompt.token_ids,
                steps_ahead=ahead + 1,
                pays=bool(pays[place]),
                holder=int(holders[place]),
                saves_s=float(saves_s[place]),
                costs_s=float(costs_s[place]),
            )
            planned.append((slack[place], item))
    return [item for _, item in sorted(planned, key=lambda entry: entry[0])]


def afford(items: list[Item], allowance_s: float, num_ranks: int) -> list[Item]:
    """The same items, of which only as many pay as the allowance is expected to last for, those of
    the nearest steps first: what they win is there in the next rollout, and pays for those of later
    steps. allowance_s: of each rank."""
    costs_s: dict[int, float] = {}
    for item in items:
        costs_s[item.steps_ahead] = (
            costs_s.get(item.steps_ahead, 0.0) + item.costs_s * item.pays / num_ranks
        )
    left_s, affordable = allowance_s, set()
    for ahead in sorted(costs_s):
        if left_s > 0:
            affordable.add(ahead)
        left_s -= costs_s[ahead]
    return [item if item.steps_ahead in affordable else replace(item, pays=False) for item in items]


def look_ahead(
    groups: list[Group], num_generations: int, store: DraftStore, history: History, outlook: Outlook
) -> tuple[Coming, list[Draft | None], np.ndarray]:
    """What is known of the responses of a coming step: what they are expected to need, and their
    drafts. The totals beside that, float64 [S], are those by which slack is judged: with a probe's
    margin on top."""
    prompt_tokens = np.array([len(group.prompt.token_ids) for group in groups], np.int64)
    guesses, margin = outlook.guess(prompt_tokens) if len(groups) else (np.empty(0), 0.0)
    drafts = [
        store.get(group.sample(number)) for group in groups for number in range(num_generations)
    ]
    totals, margins, is_probe = (np.zeros(len(drafts)) for _ in range(3))
    for number, (group, guess) in enumerate(zip(groups, guesses.tolist(), strict=True)):
        first = number * num_generations
        of_group = drafts[first : first + num_generations]
        lengths = history.lengths(group.prompt.uid)
        known = [expected_length(d, guess, outlook) for d in of_group if d is not None] or lengths
        expected = float(np.mean(known)) if known else guess
        margins[first : first + num_generations] = (
            NORMAL_QUANTILE * float(np.std(lengths)) if lengths else margin
        )
        is_probe[first] = not known
        totals[first : first + num_generations] = [
            expected
            if d is None
            else max(expected_length(d, expected, outlook), 0.0 if d.is_finished else expected)
            for d in of_group
        ]
    coming = Coming(
        totals=totals,
        margins=margins,
        drafted=np.array([0 if d is None else len(d.tokens) for d in drafts], np.float64),
        is_whole=np.array([d is not None and d.is_finished for d in drafts], bool),
        groups=np.repeat(np.arange(len(groups)), num_generations),
        prompt_tokens=np.repeat(prompt_tokens, num_generations),
    )
    return coming, drafts, totals + margin * is_probe


def undrafted(
    rows: list[Row], drafts: list[Draft | None], outlook: Outlook, history: History
) -> np.ndarray:
    """Expected tokens of each row that no draft has, float64 [rows]."""
    guesses, _ = outlook.guess(np.array([len(row.prompt) for row in rows]))
    for number, row in enumerate(rows):
        if known := history.lengths(row.id.uid):
            guesses[number] = np.mean(known)
    pairs = zip(guesses, drafts, strict=True)
    return np.array(
        [
            guess if d is None else expected_length(d, guess, outlook) - len(d.tokens)
            for guess, d in pairs
        ],
        np.float64,
    )


def expected_length(draft: Draft, guess: float, outlook: Outlook) -> float:
    """Of a finished draft its length; of another the guess, as long as it has not outgrown it."""
    so_far = len(draft.tokens)
    return (
        float(so_far) if draft.is_finished else guess if guess > so_far else outlook.total(so_far)
    )
