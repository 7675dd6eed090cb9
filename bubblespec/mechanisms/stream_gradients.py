"""Streamed gradients: idle ranks compute those of finished groups before the update begins.

This is the stream trainer of RollPacker (arXiv 2509.21009). A group whose rewards are all known
determines its samples' advantages, and a sample's contribution to the gradient is then known up to
one factor, the same for all samples of the update. So a rank that has nothing else to do adds up
the gradients of the groups that it has finished and scored, a slice at a time. The update computes
the others and scales the sum once. A reward that comes late or not at all keeps its group out,
which is computed as without streaming, and so does a group whose samples are on several ranks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bubblespec.distributed.ranks import Ranks
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.learn.learner import Learner
from bubblespec.learn.losses import local_weights
from bubblespec.learn.microbatch import Microbatch, pack_responses
from bubblespec.mechanisms import Run
from bubblespec.planner.batches import MicrobatchCost
from bubblespec.records import Samples, Span, StepRecord, count_sampled, has_zero_std
from bubblespec.rewards.scorer import RolloutRewards
from bubblespec.rollout.plan import SLICE_S, IdleTask, Mechanism, RolloutPlan
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Row, SampleId, StepBatch, completion_mask


class StreamedGradients:
    """The learner's `EarlyGradients`."""

    def __init__(self, learner: Learner):
        self.learner, self.cost = learner, MicrobatchCost()
        self.ids: set[SampleId] = set()
        """Samples whose gradients this rank has added since the last update."""
        self.is_covered: np.ndarray = np.zeros(0, bool)
        """Samples of the last update whose gradients some rank had added, bool [S]."""
        self._measured: list[torch.Tensor] = []
        learner.early = self

    def add(self, rows: list[Row], advantages: np.ndarray) -> Span:
        """Add the gradients of these finished samples, in one micro-batch. Return its time.

        advantages: float64 [rows]. Raises ValueError for a sample whose gradient has been added
        before.
        """
        learner, ranks, ids = self.learner, self.learner.ranks, [row.id for row in rows]
        if not self.ids.isdisjoint(ids):
            raise ValueError(f"some gradients of {ids} have been computed before")
        begin_s = ranks.clock.perf_counter()
        tokens, generated = [row.tokens for row in rows], [row.logprob for row in rows]
        weights = local_weights(learner.config.loss.loss_type, count_sampled(generated))
        batch = pack_responses([row.prompt for row in rows], tokens, generated, ranks.device)
        self._measured += learner.accumulate_gradients([batch], advantages, weights)
        self.ids.update(ids)
        return Span("gradient", begin_s, ranks.clock.perf_counter())

    def take(self, samples: Samples) -> tuple[np.ndarray, list[torch.Tensor]]:
        """See `EarlyGradients`. Raises ValueError for a streamed sample that is not trained on."""
        own = np.array([name in self.ids for name in samples.ids], bool)
        if num_others := len(self.ids) - own.sum():
            raise ValueError(f"{num_others} streamed samples are not trained on")
        self.is_covered = np.any(self.learner.ranks.all_gather(own.astype(np.uint8)), axis=0)
        measured, self._measured, self.ids = self._measured, [], set()
        return self.is_covered, measured

    def observe(self, microbatches: list[Microbatch], seconds: float) -> None:
        num_tokens = sum(sum(batch.sequence_lengths) for batch in microbatches)
        self.cost.observe(len(microbatches), num_tokens, seconds)

    def forget(self) -> None:
        """Discard what was added for an update that never came."""
        if self.ids:
            self.learner.optimizer.clear()
            self.ids, self._measured = set(), []


class Piece(NamedTuple):
    """A sample whose gradient can be computed."""

    row: Row
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample that a micro-batch feeds."""
        return len(self.row.prompt) + len(self.row.tokens) - 1


def pieces_of(learner: Learner, rows: Sequence[Row], rewards: np.ndarray) -> list[Piece]:
    """Return the pieces of one group: its samples that have a gradient.

    rewards: float64 [samples]."""
    loss = learner.config.loss
    (advantages,) = estimate_advantages(rewards[None], loss.advantage_estimator, loss.scale_rewards)
    return [
        Piece(row, advantage)
        for row, advantage in zip(rows, advantages.tolist(), strict=True)
        if (advantage != 0 or not learner.skips_zero_advantage)
        and not (loss.mask_truncated_completions and row.finish == "length")
        and completion_mask(row.logprob).any()
    ]


class StreamGradients(IdleTask):
    """Streamed gradients in one rollout on one rank."""

    name = "gradients"

    def __init__(
        self,
        launch: StepBatch,
        gradients: StreamedGradients,
        scoring: RolloutRewards,
        combine_rewards: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ):
        """Create the task of one rollout. combine_rewards: see `Sampler.combined`."""
        self.gradients, self.scoring, self.combine_rewards = gradients, scoring, combine_rewards
        self.config, self.cost = gradients.learner.config, gradients.cost
        # Whether there is no memory for a slice while keys and values are held.
        self.frees_cache = self.config.rollout.free_cache_engine
        self.num_generations = launch.num_generations
        self._scored: dict[tuple, dict[int, tuple[Row, float]]] = {}  # by group, then by sample
        self._pieces: list[Piece] = []  # of complete groups, not computed yet, shortest first

    def _take_rewards(self) -> None:
        """Make pieces of the groups that are complete with what was scored since the last call."""
        if not (scored := self.scoring.take_scored()):
            return
        rows, scores = zip(*scored, strict=True)
        lengths = np.array([len(row.tokens) for row in rows])
        rewards = self.combine_rewards(np.stack(scores), lengths)
        for row, reward in zip(rows, rewards.tolist(), strict=True):
            group = self._scored.setdefault(row.id[:2], {})
            group[row.id.sample] = row, reward
            if len(group) == self.num_generations:
                self._add(*zip(*(group[number] for number in sorted(group)), strict=True))
        self._pieces.sort(key=lambda piece: piece.num_tokens)

    def _add(self, rows: Sequence[Row], rewards: Sequence[float]) -> None:
        """Make pieces of a group, unless a reward lacks or dynamic sampling replaces it."""
        known = np.array(rewards)
        only_differing = self.config.rollout.dynamic_sampling_max_batches > 1
        if np.isfinite(known).all() and not (only_differing and has_zero_std(known[None])[0]):
            self._pieces += pieces_of(self.gradients.learner, rows, known)

    def next_slice(self) -> tuple[float, float]:
        size = sum(piece.num_tokens for piece in self._next_pieces())
        num_ranks = self.gradients.learner.ranks.world_size
        return self.cost.seconds(size), self.cost.tokens_s(size) / num_ranks

    def can_begin(self) -> bool:
        """Whether own rows are done or wait for environments, and there is a piece to compute.

        Only workers score while own rows are unfinished; scoring here would keep them waiting."""
        is_done = not self.view.unfinished
        if not is_done and not self.view.engine.is_waiting:
            return False
        if is_done or self.config.reward.num_workers > 0:
            self._take_rewards()
        has_memory = self.view.engine.is_idle or not self.frees_cache
        return has_memory and self.cost.is_known and bool(self._pieces)

    def do_slice(self) -> Span:
        if self.frees_cache:
            self.view.engine.release()
        pieces = self._next_pieces()
        self._pieces = [piece for piece in self._pieces if piece not in pieces]
        use = self.view.record.idle[self.name]
        use.saved_s += self.cost.tokens_s(sum(piece.num_tokens for piece in pieces))
        advantages = np.array([piece.advantage for piece in pieces])
        return self.gradients.add([piece.row for piece in pieces], advantages)

    def finish(self, ranks: Ranks) -> None:
        """Share the saved seconds evenly: the update adds up the gradients of all ranks."""
        use = self.view.record.idle[self.name]
        use.saved_s = float(ranks.all_gather(np.array([use.saved_s])).mean())

    def _next_pieces(self) -> list[Piece]:
        """Return the longest piece, and the longest others that fit into a slice with it."""
        limit = self.config.optim.max_tokens_per_microbatch
        room = min(self.cost.max_tokens(SLICE_S), limit)
        chosen: list[Piece] = []
        for piece in reversed(self._pieces):
            if not chosen or piece.num_tokens <= room:
                chosen.append(piece)
                room -= piece.num_tokens
        return chosen


class StreamGradientsMechanism(Mechanism):
    """Gradients of finished groups, computed in idle time of a step's first rollout.

    With dynamic sampling, later rollouts are not trained on as a whole.
    """

    name = "stream_gradients"

    def __init__(self, sampler: Sampler, learner: Learner):
        """Make `gradients` the learner's early gradients."""
        self.sampler, self.learner, self.gradients = sampler, learner, StreamedGradients(learner)

    def begin_rollout(self, plan: RolloutPlan) -> None:
        is_first = len(plan.used) == len(plan.launch.groups)
        if plan.step is None or plan.scoring is None or not is_first:
            return
        self.gradients.forget()  # of a rollout that was abandoned
        plan.works.append(
            StreamGradients(plan.launch, self.gradients, plan.scoring, self.sampler.combined)
        )

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        has_gradient = self.learner.has_gradient(record.samples, record.advantages)
        tokens = record.samples.lengths * has_gradient
        share = tokens @ self.gradients.is_covered / max(tokens.sum(), 1)
        return {"idle/gradients/share": float(share)}


def make(run: Run) -> StreamGradientsMechanism | None:
    """Create the mechanism, if the run streams gradients; there are none in virtual time."""
    if run.virtual is not None or not run.config.optim.stream_gradients:
        return None
    return StreamGradientsMechanism(run.sampler, run.learner)
