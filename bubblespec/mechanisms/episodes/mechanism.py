"""Episodes in a run: the feed of each rollout, and the metrics of a step."""

import numpy as np

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.engine import Engine
from bubblespec.mechanisms.episodes.environments import Environments
from bubblespec.mechanisms.episodes.episodes import STOPS, EpisodeCounts, Episodes
from bubblespec.planner.drafts import MAX_LOOKAHEAD
from bubblespec.records import StepRecord
from bubblespec.rollout.mechanism import Mechanism, RolloutPlan


class EpisodesMechanism(Mechanism):
    """Rows whose turns an environment answers."""

    name = "episodes"

    def __init__(
        self,
        config: Config,
        environments: Environments,
        engine: Engine,
        schedule: StepSchedule,
        clock,
        *,
        with_environment: bool = False,
    ):
        """with_environment: whether reward functions take the environments themselves."""
        self.config, self.environments, self.engine = config, environments, engine
        self.schedule, self.clock, self.with_environment = schedule, clock, with_environment

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Feed the rollout's rows, and those drafted for coming steps, through environments."""
        batches = [plan.launch.groups]
        if plan.step is not None:
            batches += self.schedule.upcoming(plan.step, MAX_LOOKAHEAD, plan.used)
        plan.feed = episodes = Episodes(
            self.environments,
            self.engine,
            [group.prompt for batch in batches for group in batch],
            seed=self.config.run.seed,
            clock=self.clock,
            with_environment=self.with_environment,
            runs_drafts=self.config.environment.draft,
        )
        if plan.scoring is not None:
            plan.scoring.outcomes = episodes.outcomes

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        """Return the metrics of the step's episodes, over all ranks.

        Frequencies are those of TRL: calls per episode, and the share of the calls that failed."""
        counts: list[EpisodeCounts] = [rollout.extras["episodes"] for rollout in record.rollouts]
        own = []
        for each in counts:
            *sums, stops = vars(each).values()
            own.append([*sums, *stops.values()])
        sums = ranks.gather(np.array(own, np.float64).sum(axis=0)).sum(axis=0).tolist()
        turns, calls, failed, environment_s, waiting_s, idle_s, differing, *stops = sums
        total = max(sum(stops), 1)
        metrics = {
            "tools/call_frequency": calls / total,
            "tools/failure_frequency": failed / calls if calls else 0.0,
            "episodes/turns": turns / total,
            "episodes/covered_share": 1 - idle_s / waiting_s if waiting_s else 1.0,
            "episodes/differing_replays": differing,
            "timing_s/environment": environment_s / total,
        }
        shares = zip(STOPS, stops, strict=True)
        return metrics | {f"episodes/stop/{reason}": count / total for reason, count in shares}
