"""Which responses to draft first, and which are worth slowing down a rank's own rows for.

First come those with the least slack: the forwards that the rollouts until their step will have, minus the tokens they are
expected to need. So a long response is begun many steps before its own, and of equally long ones the nearest comes first.
How long a response gets is guessed from its own draft so far, its siblings' drafts, its prompt's responses in earlier epochs,
and else from the length of the prompt; in the last case one of the samples goes first, as a probe.

A draft pays where it shortens its own step by more than making and verifying it costs. The first tokens of a response share
their forwards with the whole batch, and little is saved by not decoding them; the last tokens of a long response have a
forward to themselves, if the draft holds that long.
"""

from dataclasses import dataclass

import numpy as np

from bubblespec.records import Draft, Group, Row, SampleId
from bubblespec.speculate.store import DraftStore
from bubblespec.speculate.suffix import History

PROBE_QUANTILE = 0.9  # the first sample of a prompt of which nothing is known is taken to be this long
# What has more slack than so many rollouts can wait: fresher weights draft it better.
PATIENCE = 1.0
TYPICAL_WINDOW = 8.0  # draft tokens that a row is verified by in a forward
# Drafts must win more than they cost by so much. At 1.0 short forwards lose a little, at 2.0 good drafts win less (simulated).
CAUTION = 1.5


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
    """Seconds that the whole draft is expected to save its step, less its cost; 0 where nothing is known yet."""


class Outlook:
    """Lengths of recent responses, and what they say about those to come. The same on every rank."""

    def __init__(self, num_kept: int = 4096):
        self.num_kept = num_kept
        self.seen = np.empty((0, 2), np.int64)  # tokens of the prompt and of the response, latest last

    def learn(self, prompt_lengths: np.ndarray, lengths: np.ndarray) -> None:
        """Take in responses: tokens of their prompts and of themselves, int64 [responses]. The oldest are forgotten."""
        self.seen = np.concatenate((self.seen, np.stack((prompt_lengths, lengths), axis=1)))[-self.num_kept :]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the responses seen, int64, latest last."""
        return self.seen[:, 1]

    def guess(self, prompt_lengths: np.ndarray) -> tuple[np.ndarray, float]:
        """Expected length of a response to prompts of these lengths, by a straight line through what was seen, float64
        [prompts]; and how much longer than that it easily gets (the share PROBE_QUANTILE does not)."""
        if len(self.seen) == 0:
            return np.ones(len(prompt_lengths)), 0.0
        x, y = self.seen.T.astype(np.float64)
        slope = ((x - x.mean()) * (y - y.mean())).mean() / max(x.var(), 1e-9)
        line = np.maximum(y.mean() + slope * (prompt_lengths - x.mean()), 1.0)
        return line, max(float(np.quantile(y - y.mean() - slope * (x - x.mean()), PROBE_QUANTILE)), 0.0)

    def total(self, so_far: int) -> float:
        """Expected length of a response that has `so_far` tokens and goes on; twice that if none has been so long."""
        longer = self.lengths[self.lengths > so_far]
        return float(longer.mean()) if len(longer) else 2.0 * so_far

    def expected_saving(
        self, num_rows: int, num_slots: int, cost: np.ndarray, p_before: float = 1.0, *, p_after: float = 0.0
    ) -> np.ndarray:
        """Seconds won by a draft of 0, 1, ... tokens, float64 [longest + 1], in a batch of `num_rows` rows a rank.

        cost: coefficients of a `CostModel`; p_before: chance that a token before the first mismatch is accepted; p_after: share
        of the tokens after it that the draft still gives. A forward is saved if no row needs it. Before their first mismatch all
        rows that have got so far must go on in their drafts for that; after it, suffix matches shorten all rows alike.
        """
        longest = int(self.lengths.max(initial=1))
        position = np.arange(1, longest + 1)
        alive = 1.0 - np.searchsorted(np.sort(self.lengths), position - 1, side="right") / max(len(self.lengths), 1)
        sharing = np.clip(num_rows * alive, 1.0, min(num_slots, num_rows))
        forward_s, row_s, token_s, wide_row_s, _ = cost
        saved = p_after + (1 - p_after) * p_before ** (position * sharing)
        refused = (1 - p_after) * (1 - p_before**position)
        # Making a token costs what not decoding it saves, unless it is refused. What is left is its verification.
        spent = token_s + wide_row_s / TYPICAL_WINDOW + refused * (row_s + token_s)
        return np.concatenate(([0.0], np.cumsum(forward_s / sharing * saved - CAUTION * spent)))


def plan_items(
    batches: list[list[Group]],
    num_generations: int,
    store: DraftStore,
    history: History,
    *,
    outlook: Outlook,
    forwards_per_step: float,
    saving: np.ndarray | None = None,
) -> list[Item]:
    """What is left to draft, least slack first. The samples of a prompt keep together where they can.

    batches: of the coming steps, nearest first; saving: see `Outlook.expected_saving`, None where nothing is known yet.
    """
    planned = []
    for ahead, groups in enumerate(batches):
        guesses, margin = outlook.guess(np.array([len(group.prompt.token_ids) for group in groups]))
        for group, guess in zip(groups, guesses, strict=True):
            drafts = [store.get(group.sample(number)) for number in range(num_generations)]
            if all(draft is not None and draft.is_finished for draft in drafts):
                continue
            known = [expected_length(d, guess, outlook) for d in drafts if d is not None] or history.lengths(group.prompt.uid)
            expected = float(np.mean(known)) if known else float(guess)
            for sample, draft in enumerate(drafts):
                if draft is not None and draft.is_finished:
                    continue
                so_far, holder = (len(draft.tokens), draft.holder) if draft is not None else (0, -1)
                is_probe = not known and sample == 0
                total = expected + margin if is_probe else expected
                if so_far:
                    total = max(total, expected_length(draft, expected, outlook))
                slack = ahead * forwards_per_step - (total - so_far)
                is_due = holder >= 0 or slack < PATIENCE * forwards_per_step  # what is begun goes on
                saves_s = 0.0 if saving is None else float(saving[min(int(total), len(saving) - 1)])
                item = Item(group.sample(sample), group.prompt.token_ids, ahead + 1, saves_s > 0 and is_due, holder, saves_s)
                planned.append((slack, item))
    return [item for _, item in sorted(planned, key=lambda entry: entry[0])]


def undrafted(rows: list[Row], drafts: list[Draft | None], outlook: Outlook) -> np.ndarray:
    """Expected tokens of each row that no draft has, float64 [rows]."""
    guesses, _ = outlook.guess(np.array([len(row.prompt) for row in rows]))
    pairs = zip(guesses, drafts, strict=True)
    return np.array(
        [guess if d is None else expected_length(d, guess, outlook) - len(d.tokens) for guess, d in pairs], np.float64
    )


def expected_length(draft: Draft, guess: float, outlook: Outlook) -> float:
    """Of a finished draft its length; of another the guess, as long as it has not outgrown it."""
    so_far = len(draft.tokens)
    return float(so_far) if draft.is_finished else guess if guess > so_far else outlook.total(so_far)
