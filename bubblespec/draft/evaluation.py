"""Drafts of an evaluation: the responses of the one before.

Every evaluation generates the same held-out prompts with the same noise (`EVALUATION` in
engine/noise.py) under newer weights. So its responses are drafts of the next one's, as those made
in idle time are of a coming step's: same keys, older weights. Held-out prompts may be of another
kind, and sampled at another temperature: what is learned here is kept apart from training.
"""

import numpy as np

from bubblespec.config import Config
from bubblespec.draft.history import History
from bubblespec.draft.proposer import Proposer, make_proposer
from bubblespec.draft.store import DraftStore
from bubblespec.types import Draft, Row, Samples


class EvaluationDrafts:
    """What one evaluation leaves to the next; the same on every rank, but for the estimates of
    survival."""

    def __init__(self, proposer: Proposer, max_tokens: int):
        """proposer: of evaluations alone; max_tokens: of all drafts together."""
        self.proposer = proposer
        self.store = DraftStore(max_tokens)

    def begin(self, rows: list[Row], version: int) -> Proposer:
        """An evaluation of these rows is about to begin, under weights that have had `version`
        updates. Returns the proposer for it."""
        self.proposer.begin()
        for row in rows:
            self.proposer.track(row, self.store.get(row.id), version)
        return self.proposer

    def observe(self, samples: Samples, version: int) -> None:
        """Keep an evaluation's responses in place of those before: all, or the longest of them, as
        many as there is room for."""
        ids = samples.ids
        self.store = DraftStore(self.store.max_tokens)
        for index in np.argsort(-samples.lengths, kind="stable").tolist():
            tokens = np.array(samples.tokens[index], np.int32)
            self.store.put(ids[index], Draft(tokens, True, version))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Drafts, and the shares of them that were accepted, as arrays."""
        drafts = {f"drafts.{k}": array for k, array in self.store.state_dict().items()}
        survival = self.proposer.survival.state_dict()
        return drafts | {f"survival.{key}": array for key, array in survival.items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state."""
        for name, part in (("drafts.", self.store), ("survival.", self.proposer.survival)):
            saved = {k.removeprefix(name): a for k, a in state.items() if k.startswith(name)}
            part.load_state_dict(saved)


def make_evaluation_drafts(config: Config, training: Proposer, max_tokens: int) -> EvaluationDrafts:
    options = {"has_drafts": True, "clock": training.clock}
    proposer = make_proposer(config.speculative.method, History(0), training.cost, **options)
    return EvaluationDrafts(proposer, max_tokens)
