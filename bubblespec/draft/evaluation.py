"""Drafts of an evaluation: the responses of the one before.

Every evaluation generates the same held-out prompts with the same noise (`EVALUATION` in
engine/noise.py) under newer weights. So its responses are drafts of the next one's, as those made
in idle time are of a coming step's: same keys, older weights.

Held-out prompts may be of another kind, and sampled at another temperature. So what is learnt here
is kept apart from training: drafts, rows, survival, counts. Taken from there are the cost of a
forward, and the survival of what was never proposed here.
"""

from collections.abc import Sequence

import numpy as np

from bubblespec.config import Config
from bubblespec.draft.proposer import Proposer, make_proposer
from bubblespec.draft.store import DraftStore
from bubblespec.draft.suffix import History
from bubblespec.draft.windows import Survival
from bubblespec.engine.noise import EVALUATION
from bubblespec.types import Draft, Group, Prompt, Row, SampleId, Samples

PRIOR_SHARE_BEHIND = 0.5  # before an evaluation has been compared with its drafts


class EvaluationDrafts:
    """What one evaluation leaves to the next; the same on every rank, but for the estimates of
    survival."""

    def __init__(
        self, groups: list[Group], proposer: Proposer, of_training: Survival, max_tokens: int
    ):
        """groups: held-out; proposer: of evaluations alone; max_tokens: of all drafts together."""
        self.groups, self.proposer, self.of_training = groups, proposer, of_training
        self.store = DraftStore(max_tokens)
        # of the last evaluation's tokens, those behind the first difference from a draft
        self.share_behind = PRIOR_SHARE_BEHIND

    def begin(self, rows: dict[int, Row], version: int) -> dict[int, Row]:
        """An evaluation of these rows is about to begin, under weights that have had `version`
        updates. Returns them in the order in which they should be generated: where rows wait for
        slots, the groups with the longest drafts must not wait."""
        self.proposer.begin()
        self.proposer.survival.adopt(self.of_training)
        longest: dict[tuple[int, int], int] = {}
        for row in rows.values():
            draft = self.store.get(row.id)
            self.proposer.track(row, draft, version)
            longest[row.id[:2]] = max(
                longest.get(row.id[:2], 0), 0 if draft is None else len(draft.tokens)
            )
        return dict(sorted(rows.items(), key=lambda item: -longest[item[1].id[:2]]))

    def learn(self, samples: Samples, version: int) -> None:
        """Keep an evaluation's responses in place of those before: all, or the longest of them, as
        many as there is room for."""
        ids, lengths = samples.ids, samples.lengths
        drafts = [self.store.get(name) for name in ids]
        known = [i for i, draft in enumerate(drafts) if draft is not None]
        if known:
            right = sum(num_common(drafts[i].tokens, samples.tokens[i]) for i in known)
            self.share_behind = 1.0 - right / int(lengths[known].sum())
        self.store = DraftStore(self.store.max_tokens)
        for i in np.argsort(-lengths, kind="stable").tolist():
            self.store.put(ids[i], Draft(np.array(samples.tokens[i], np.int32), True, version))

    def renew(self, names: list[SampleId], store: DraftStore) -> None:
        """Take what newer weights have drafted out of `store`. Unfinished drafts that so far are as
        those here do not replace them: these go further."""
        for name in names:
            if (draft := store.get(name)) is not None:
                old = self.store.get(name)
                if (
                    draft.is_finished
                    or old is None
                    or num_common(draft.tokens, old.tokens) < len(draft.tokens)
                ):
                    self.store.put(name, draft)
        store.drop(names)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Drafts, and the shares of them that were accepted, as arrays."""
        parts = {"drafts": self.store.state_dict(), "survival": self.proposer.survival.state_dict()}
        flat = {
            f"{name}.{key}": array for name, part in parts.items() for key, array in part.items()
        }
        return flat | {"share_behind": np.array(self.share_behind)}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state; an empty one, of a run without these drafts, leaves everything
        as it is."""
        for name, part in (("drafts", self.store), ("survival", self.proposer.survival)):
            if saved := {
                key.split(".", 1)[1]: array
                for key, array in state.items()
                if key.startswith(f"{name}.")
            }:
                part.load_state_dict(saved)
        self.share_behind = float(state.get("share_behind", self.share_behind))


def num_common(a: np.ndarray, b: np.ndarray) -> int:
    """Tokens up to the first difference."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def make_evaluation_drafts(
    config: Config, training: Proposer, held_out: Sequence[Prompt]
) -> EvaluationDrafts | None:
    """None where evaluations are plain: without speculation, and under point_mass, whose noise no
    draft may have seen."""
    speculative = config.speculative
    if speculative.method == "none" or speculative.rule == "point_mass":
        return None
    options = {
        "has_drafts": True,
        "fixed_window": speculative.fixed_window,
        "clock": training.clock,
    }
    proposer = make_proposer(speculative.method, History(0), training.cost, **options)
    groups = [Group(prompt, EVALUATION) for prompt in held_out]
    return EvaluationDrafts(groups, proposer, training.survival, config.bubble.max_draft_tokens)
