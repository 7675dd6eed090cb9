"""Making of a run's sampler."""

from typing import Any

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.store import TextStore
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.errors import log
from bubblespec.memory import host_token_budget
from bubblespec.planner.chooser import DRAFTS, Chooser
from bubblespec.planner.costs import CostModel
from bubblespec.planner.stats import RunStats
from bubblespec.planner.survival import AcceptanceStats
from bubblespec.rollout.board import ProgressSync
from bubblespec.rollout.drafting import Drafting
from bubblespec.rollout.profile import profile
from bubblespec.rollout.sampler import Sampler, vocab_size_of

VIRTUAL_TOKENS = (1 << 28, 1 << 28)  # of drafts and history: the simulator is about time


def make_sampler(
    config: Config,
    ranks: Ranks,
    engine: Engine,
    params: SamplingParams,
    schedule: StepSchedule,
    scorer: Any,
    *,
    reward_weights: list[float],
    drafts_ahead: bool = True,
    board: ProgressSync | None = None,
    cost: CostModel | None = None,
) -> Sampler:
    """Create the sampler of a run, on all ranks together.

    drafts_ahead: whether idle time may draft samples of coming steps, if speculative.method names
    bubble; board, cost: given in virtual time, where nothing is measured.
    """
    max_draft_tokens, max_history_tokens = VIRTUAL_TOKENS if cost else host_token_budget(ranks)
    sources = config.speculative.sources
    if cost is None:
        cost = CostModel()
        if config.has_drafts:
            show = log if ranks.is_main else lambda line: None
            profile(engine, params, cost, clock=ranks.clock, show=show)
    together = config.rows_together(ranks.world_size)
    works = config.trains_in_rollouts or config.scores_in_rollouts
    if board is None and (config.has_drafts or together != 0 or works):
        board = ProgressSync(ranks, config.run.timeout_s, config.rollout.progress_backend)
    history = TextStore(max_history_tokens, keeps_latest=True)
    proposer = None
    if config.has_drafts:
        proposer = make_proposer(
            sources,
            history,
            cost,
            has_drafts=config.keeps_drafts,
            always=config.speculative.planning == "always",
            clock=ranks.clock,
            vocab_size=vocab_size_of(engine),
        )
    # Without drafts the choice is about a take-over by cost.
    may_choose = (bool(sources) or together == "auto") and not schedule.defers
    parts = [DRAFTS] if may_choose and config.speculative.planning == "by_cost" else []
    survival = AcceptanceStats() if proposer is None else proposer.survival
    stats = RunStats(cost, survival, chooser=Chooser(parts))
    store = TextStore(max_draft_tokens)
    sampler = Sampler(
        config=config,
        ranks=ranks,
        engine=engine,
        params=params,
        schedule=schedule,
        scorer=scorer,
        reward_weights=reward_weights,
        stats=stats,
        store=store,
        history=history,
        proposer=proposer,
        board=board,
    )
    if "bubble" in sources and drafts_ahead and proposer is not None:
        sampler.mechanisms.append(Drafting(sampler, proposer))
    return sampler
