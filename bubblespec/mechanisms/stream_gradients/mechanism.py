"""Streamed gradients in a run: what the sampler and the trainer see of them."""

from collections.abc import Callable

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.learn.learner import Learner
from bubblespec.mechanisms.stream_gradients.gradients import StreamedGradients
from bubblespec.mechanisms.stream_gradients.idle_task import StreamGradients
from bubblespec.records import StepRecord
from bubblespec.rollout.mechanism import Mechanism, RolloutPlan


class StreamGradientsMechanism(Mechanism):
    """Gradients of finished groups, computed in idle time of a step's first rollout.

    With dynamic sampling, later rollouts are not trained on as a whole.
    """

    name = "stream_gradients"

    def __init__(
        self, learner: Learner, combine_rewards: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ):
        """Make `gradients` the learner's early gradients.

        combine_rewards: returns training rewards, float64 [S], given each function's rewards,
        [S, functions], and lengths, [S].
        """
        self.learner, self.combine_rewards = learner, combine_rewards
        self.gradients = StreamedGradients(learner)

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """See `Mechanism`."""
        is_first = len(plan.used) == len(plan.launch.groups)
        if plan.step is None or plan.scoring is None or not is_first:
            return
        self.gradients.forget()  # of a rollout that was abandoned
        plan.tasks.append(
            StreamGradients(plan.launch, self.gradients, plan.scoring, self.combine_rewards)
        )

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        """See `Mechanism`."""
        has_gradient = self.learner.has_gradient(record.samples, record.advantages)
        tokens = record.samples.lengths * has_gradient
        share = tokens @ self.gradients.is_covered / max(tokens.sum(), 1)
        return {"idle/gradients/share": float(share)}
