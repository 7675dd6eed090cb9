"""The choice of samples of coming steps that a rollout's idle time drafts."""

import math

from bubblespec.draft.proposer import Proposer
from bubblespec.idle.draft_ahead import MAX_SLOWDOWN, DraftAhead
from bubblespec.planner.drafts import choose_lookahead, plan_drafts
from bubblespec.rollout.mechanism import Mechanism
from bubblespec.rollout.plan import RolloutPlan
from bubblespec.rollout.sampler import Sampler


class Drafting(Mechanism):
    """Adds a `DraftAhead` to each rollout in which something is left to draft."""

    name = "drafting"

    def __init__(self, sampler: Sampler, proposer: Proposer):
        self.sampler, self.proposer = sampler, proposer

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Plan what to draft in a rollout of a step; nothing while the guard has paused drafts."""
        sampler, stats, step = self.sampler, self.sampler.stats, plan.step
        if step is None or stats.is_paused:
            return
        config, schedule, store = sampler.config, sampler.schedule, sampler.store
        depth = choose_lookahead(
            step,
            steps_left=config.run.max_steps - step - 1,
            steps_stored=store.max_tokens / max(stats.tokens_per_step, 1.0),
            accepted=stats.survival.by_age,
        )
        batches = schedule.upcoming(step, depth, plan.used) if depth else []
        if batches and stats.is_next_without:
            batches[0] = []  # the guard runs the next rollout without drafts
        if not any(batches):
            return
        # A short round of tail batching has no tail that co-scheduled drafts could shorten, and a
        # rollout that drafts are compared with must not be slowed down by any.
        idle_only = config.tail_batching.enabled or not plan.is_on
        planning = "idle_only" if idle_only else config.speculative.planning
        drafts = plan_drafts(
            batches,
            config.rollout.num_generations,
            store.get,
            stats.lengths,
            cost=stats.cost_without(stats.guards.paused),
            rates=stats.survival.rates,
            prices=stats.pricing.prices,
            forwards_per_step=stats.forwards,
            num_ranks=sampler.ranks.world_size,
            num_slots=sampler.engine.num_slots,
            oldest_verified=max(stats.survival.by_age, default=None),
            planning=planning,
            deferred={group.name for group in schedule.deferred},
        )
        prices = stats.pricing.prices
        plan.ahead = DraftAhead(
            drafts.jobs,
            store,
            self.proposer,
            stats.cost,
            version=step,
            max_new_tokens=config.rollout.max_completion_length,
            max_slowdown=math.inf if planning == "always" else MAX_SLOWDOWN,
            worth_s=math.inf if prices is None else prices.drafted_s * drafts.worth,
        )
