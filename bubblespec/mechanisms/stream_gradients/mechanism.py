"""Streamed gradients in a run: what the sampler and the trainer see of them."""

from bubblespec.distributed.ranks import Ranks
from bubblespec.learn.learner import Learner
from bubblespec.mechanisms.stream_gradients.gradients import StreamedGradients
from bubblespec.mechanisms.stream_gradients.idle_task import StreamGradients
from bubblespec.records import StepRecord
from bubblespec.rollout.mechanism import Mechanism
from bubblespec.rollout.plan import RolloutPlan
from bubblespec.rollout.sampler import Sampler


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
