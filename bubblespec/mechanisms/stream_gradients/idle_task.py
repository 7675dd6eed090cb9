"""The idle task of streamed gradients: a waiting rank computes gradients of its own samples.

Every rank publishes the rewards of the samples that it has finished and scored. A group is complete
once all of its rewards are known; then each rank can compute advantages, and gradients of the
group's samples that it has generated itself, a slice at a time. A reward that comes late or not at
all keeps its group out: the update computes the group's gradients as without streaming.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.idle.task import SLICE_S, LocalWork
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.learn.learner import Learner
from bubblespec.mechanisms.stream_gradients.gradients import StreamedGradients
from bubblespec.records import Span
from bubblespec.rewards.scorer import Scoring
from bubblespec.samples import has_zero_std
from bubblespec.types import Launch, Row, is_sampled


class Piece(NamedTuple):
    """A sample whose gradient can be computed."""

    row: Row
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Tokens of the sample that a micro-batch feeds."""
        return len(self.row.prompt) + len(self.row.tokens) - 1


def pieces_of(learner: Learner, rows: Sequence[Row | None], rewards: np.ndarray) -> list[Piece]:
    """Return the pieces of one group: this rank's samples that have a gradient.

    rows: None for samples of other ranks; rewards: float64 [samples], of all samples.
    """
    loss = learner.config.loss
    (advantages,) = estimate_advantages(rewards[None], loss.advantage_estimator, loss.scale_rewards)
    return [
        Piece(row, advantage)
        for row, advantage in zip(rows, advantages.tolist(), strict=True)
        if row is not None
        and (advantage != 0 or not learner.skips_zero_advantage)
        and not (loss.mask_truncated_completions and row.finish == "length")
        and is_sampled(row.full_logprob).any()
    ]


class StreamGradients(LocalWork):
    """Streamed gradients in one rollout on one rank."""

    name = "gradients"

    def __init__(
        self,
        launch: Launch,
        gradients: StreamedGradients,
        scoring: Scoring,
        combine_rewards: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ):
        """Create the task of one rollout. combine_rewards: see `Sampler.combined`."""
        self.gradients, self.scoring, self.combine_rewards = gradients, scoring, combine_rewards
        self.config, self.cost = gradients.learner.config, gradients.cost
        self.shape = (len(launch.groups), launch.num_generations)
        self._index_of = {sample: index for index, sample in enumerate(launch.ids)}
        self._rows: dict[int, Row] = {}  # this rank's scored ones, by index in the launch
        self._own_rewards = np.full(self.shape, np.nan)
        self._is_complete = np.zeros(len(launch.groups), bool)
        self._num_ranks = 1
        self._pieces: list[Piece] = []  # of complete groups, not computed yet, shortest first

    @property
    def scores_in_workers(self) -> bool:
        """Whether rewards come from other processes, and so also while own rows are unfinished."""
        return self.config.reward.num_workers > 0

    @property
    def frees_cache(self) -> bool:
        """Whether there is no memory for a slice while keys and values are held."""
        return self.config.rollout.free_cache_engine

    def publish(self) -> np.ndarray:
        """Return the rewards of this rank's samples, NaN elsewhere."""
        if self.scores_in_workers or not self.view.unfinished:
            self._take_rewards()
        return self._own_rewards.ravel()

    def _take_rewards(self) -> None:
        """Take in this rank's rows that are trained on and were scored since the last call."""
        if not (scored := self.scoring.take_scored()):
            return
        rows, scores = zip(*scored, strict=True)
        lengths = np.array([len(row.tokens) for row in rows])
        rewards = self.combine_rewards(np.stack(scores), lengths)
        for row, reward in zip(rows, rewards.tolist(), strict=True):
            index = self._index_of[row.id]
            self._rows[index], self._own_rewards.flat[index] = row, reward

    def receive(self, published: list[np.ndarray]) -> None:
        """Make pieces of the groups that have become complete."""
        self._num_ranks = len(published)
        # One rank has each sample's reward.
        known = np.fmax.reduce(np.stack(published)).reshape(self.shape)
        is_complete = np.isfinite(known).all(axis=1)
        # Dynamic sampling replaces groups of equal rewards.
        only_differing = self.config.rollout.dynamic_sampling_max_batches > 1
        for group in np.flatnonzero(is_complete & ~self._is_complete).tolist():
            if only_differing and has_zero_std(known[[group]])[0]:
                continue
            begin, size = group * self.shape[1], self.shape[1]
            rows = [self._rows.get(index) for index in range(begin, begin + size)]
            self._pieces += pieces_of(self.gradients.learner, rows, known[group])
        self._pieces.sort(key=lambda piece: piece.num_tokens)
        self._is_complete = is_complete

    def next_slice(self) -> tuple[float, float]:
        size = sum(piece.num_tokens for piece in self._next_pieces())
        return self.cost.seconds(size), self.cost.tokens_s(size) / self._num_ranks

    def can_begin(self) -> bool:
        """Whether own rows are done or wait for environments, and there is a piece to compute."""
        is_idle = not self.view.unfinished or self.view.is_idle
        is_idle &= self.view.engine.is_idle or not self.frees_cache
        return is_idle and self.cost.is_known and bool(self._pieces)

    def do_slice(self) -> Span:
        if self.frees_cache:
            self.view.engine.release()
        pieces = self._next_pieces()
        taken = set(map(id, pieces))
        self._pieces = [piece for piece in self._pieces if id(piece) not in taken]
        use = self.view.record.idle[self.name]
        use.saved_s += self.cost.tokens_s(sum(piece.num_tokens for piece in pieces))
        advantages = np.array([piece.advantage for piece in pieces])
        return self.gradients.add([piece.row for piece in pieces], advantages)

    def finish(self, ranks: Ranks) -> None:
        """Share the saved seconds evenly: the update adds up the gradients of all ranks."""
        use = self.view.record.idle[self.name]
        use.saved_s = float(ranks.gather(np.array([use.saved_s])).mean())

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
