"""Disturbs a run from outside; none of it may change a token.

Preemption: after a forward, with probability `preempt`, some rows are dropped from the engine,
active or queued, of the step or drafts, and added again at the end of the queue. Corruption: a
share of the drafts that a rank has made is spoilt before the exchange, so that all ranks still hold
the same ones, and a share of the proposals before the engine verifies them.
"""

import dataclasses

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.ragged import packed, unpacked
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.rollout.mechanism import Mechanism
from bubblespec.rollout.plan import RolloutPlan
from bubblespec.trainer import Trainer
from bubblespec.types import Draft, Load, Row, SampleId

COUNTS = ("own rows preempted", "draft rows preempted", "drafts corrupted", "proposals corrupted")
MAX_ROWS = 4  # preempted after one forward


def corrupt_tokens(tokens: np.ndarray, rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Some tokens replaced at random, or the end cut off, or garbage added to it."""
    kind = rng.choice(("replace", "cut", "extend"))
    if kind == "cut":
        return tokens[: rng.integers(len(tokens) + 1)]
    if kind == "extend" or len(tokens) == 0:
        garbage = rng.integers(0, vocab_size, rng.integers(1, 20))
        return np.concatenate((tokens, garbage.astype(tokens.dtype)))
    wrong = rng.random(len(tokens)) < 0.2
    wrong[rng.integers(len(tokens))] = True
    return np.where(wrong, rng.integers(0, vocab_size, len(tokens)), tokens).astype(tokens.dtype)


def corrupt_drafts(
    drafts: dict[SampleId, Draft],
    rng: np.random.Generator,
    share: float,
    vocab_size: int,
    max_new_tokens: int,
) -> tuple[dict[SampleId, Draft], int]:
    """A share of the drafts with other tokens and either finished flag; and how many.

    A draft that says it is unfinished keeps room for one more token: it will be drafted further,
    and the engine refuses a row that is full already.
    """
    result, count = {}, 0
    for key, draft in drafts.items():
        if rng.random() < share:
            count += 1
            tokens = corrupt_tokens(draft.tokens, rng, vocab_size)
            is_finished = bool(rng.random() < 0.5)
            room = max_new_tokens - (not is_finished)
            draft = dataclasses.replace(draft, tokens=tokens[:room], is_finished=is_finished)
        result[key] = draft
    return result, count


class Disturbance(Mechanism):
    """Disturbs a trainer's rollouts from now on. `counts`: what it has done on this rank, by the
    names in COUNTS."""

    name = "disturbance"

    def __init__(self, trainer: Trainer, preempt: float, corrupt: float, seed: int = 0):
        self.trainer, self.preempt, self.corrupt = trainer, preempt, corrupt
        self.rng = np.random.default_rng((seed, trainer.ranks.rank))
        self.counts = dict.fromkeys(COUNTS, 0)
        self.vocab_size = trainer.learner.model.get_input_embeddings().num_embeddings
        self.drafting: DraftAhead | None = None
        sampler = trainer.sampler
        self._step, sampler.engine.step = sampler.engine.step, self.step
        sampler.mechanisms.append(self)
        if sampler.board is not None:
            sampler.board.interval_s = 0.0  # a tick at every forward: the clock chooses none
        if sampler.proposer is not None:
            self._propose = sampler.proposer.propose
            sampler.proposer.propose = self.propose

    def step(self, *arguments) -> tuple[list[Row], Load]:
        result, engine = self._step(*arguments), self.trainer.sampler.engine
        if self.rng.random() < self.preempt:
            rows = [*engine.rows, *engine.queue]
            chosen = self.rng.permutation(len(rows))[: self.rng.integers(1, MAX_ROWS + 1)]
            taken = [rows[index] for index in chosen]
            for row in taken:
                engine.drop(row)
                is_own = self.drafting is None or row in self.drafting.view.unfinished
                self.counts["own rows preempted" if is_own else "draft rows preempted"] += 1
            engine.add(taken)
        return result

    def begin_rollout(self, plan: RolloutPlan) -> None:
        self.drafting = plan.ahead
        if (drafting := self.drafting) is None:
            return
        finish = drafting.finish

        def finish_corrupted(ranks: Ranks) -> None:
            max_tokens = self.trainer.config.rollout.max_completion_length
            drafting.drafts, count = corrupt_drafts(
                drafting.drafts, self.rng, self.corrupt, self.vocab_size, max_tokens
            )
            self.counts["drafts corrupted"] += count
            finish(ranks)

        drafting.finish = finish_corrupted

    def propose(self, *arguments) -> tuple[np.ndarray, np.ndarray]:
        proposals = unpacked(*self._propose(*arguments))
        for i, tokens in enumerate(proposals):
            if len(tokens) and self.rng.random() < self.corrupt:
                proposals[i] = corrupt_tokens(tokens, self.rng, self.vocab_size)
                self.counts["proposals corrupted"] += 1
        return packed(proposals)
