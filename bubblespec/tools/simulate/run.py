"""Simulate the rollouts of a run: each rank runs the real sampler on an engine with known texts."""

import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

from bubblespec.config import Config
from bubblespec.data.schedule import save_visits
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.errors import InputError
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.reward_models.mechanism import ModelPool
from bubblespec.mechanisms.tail_batching import MAX_OVER_SAMPLING, scaled
from bubblespec.mechanisms.tp_tail.tail import AUTO_ROWS, TPTail, measure
from bubblespec.memory import max_slots
from bubblespec.planner.costs import CostModel
from bubblespec.planner.prices import Prices
from bubblespec.records import digest
from bubblespec.rewards.functions import Sample
from bubblespec.rollout.board import ProgressSync
from bubblespec.rollout.make_sampler import make_sampler
from bubblespec.rollout.profile import profile
from bubblespec.setup import add_mechanisms, call, make_schedule
from bubblespec.telemetry.timeline import KINDS
from bubblespec.tools.simulate.runner import (
    FREE,
    CopyModel,
    Cost,
    DrafterModel,
    SimulatedEnvironments,
    SimulatedRewardModel,
    SimulatedRunner,
    Text,
    copy_chains,
    drafter_chains,
)
from bubblespec.tools.simulate.workload import SimulatedTexts, Workload
from bubblespec.tools.simulate.world import SimulatedRanks, SimulatedTicks, World
from bubblespec.types import Row, SampleId, StepBatch


@dataclass
class SimulatedStep:
    """One step's rollout."""

    step: int
    seconds: float
    """Seconds from the begin of the rollout to the end of its last rank, and of its scoring where a
    reward model scores."""
    forwards: int  # forwards before a rank's own rows were done; the largest number of all ranks
    shared_forwards: int  # forwards of all ranks together, in the TP tail; not in `forwards`
    idle_share: float  # share of the rollout that ranks spent waiting
    drafted_tokens: int  # tokens drafted for later steps
    proposed_tokens: int  # draft tokens verified
    refused_tokens: int  # verified draft tokens that were rejected
    response_tokens: int  # tokens of the responses that are trained on
    is_long_round: bool  # whether tail batching makes this a long round
    length_ratio: float  # mean length of all responses trained on so far over that of all launched
    digest: str
    lanes: list[np.ndarray] = field(repr=False)  # spans by rank, see `draw` in timeline.py


def simulate(
    config: Config,
    workload: Workload,
    cost: Cost,
    num_ranks: int,
    *,
    together: Cost | None = None,
    drafter: DrafterModel | None = None,
    quantized: CopyModel | None = None,
    copy_cost: Cost | None = None,
    reward_cost: Cost | None = None,
    prices: Prices = FREE,
    shows_progress: bool = False,
) -> list[SimulatedStep]:
    """Simulate the steps of a workload. Raises InputError if the configuration does not fit it.

    cost(load): seconds of a forward; together(load): seconds of a forward of all ranks together,
    None for no TP tail; drafter, quantized: used if the method has them, or auto and one is given;
    copy_cost(load): seconds of a forward of the quantised copy, if its model has no share;
    reward_cost(load): of a reward model that scores all responses, None for none; prices: of what
    comes with forwards, for which a run's own fit may be given. Training and other rewards take no
    time."""
    config = copy.deepcopy(config)
    config.run.max_steps = num_steps = steps_that_fit(config, workload)
    config.rollout.dynamic_sampling_max_batches = 1
    config.reward.overlong_buffer_length = 0
    config.reward.functions = [] if reward_cost is None else [SimulatedRewardModel.path]
    if together is None or num_ranks == 1 or workload.has_tools:
        config.rollout.tp_tail_max_rows = 0
    _check(config, workload, num_ranks)
    if not config.speculative.may_have_drafter:
        drafter = None
    elif drafter is None and "drafter" in config.speculative.sources:
        drafter = DrafterModel()
    models = drafter, quantized or CopyModel()
    shared = _Shared(config, workload, cost, together, *models, copy_cost, reward_cost, prices)
    shared.time_forwards()
    world, steps = World(num_ranks), []
    is_hidden = None if shows_progress else True  # None: hidden unless standard error is a screen
    method = config.speculative.method
    with tqdm(total=num_steps, desc=method, unit="step", disable=is_hidden) as bar:

        def run_rank(rank: int) -> None:
            own = _Rank(shared, SimulatedRanks(world, rank))
            for number in range(num_steps):
                step = own.run_step(number)
                if rank == 0:
                    steps.append(step)
                    bar.update()

        world.run(run_rank)
    return steps


def steps_that_fit(config: Config, workload: Workload) -> int:
    """Return how many steps the prompts suffice for. Raises InputError where that is none."""
    tail = config.tail_batching
    if not tail.enabled:
        return workload.num_steps
    ratio = MAX_OVER_SAMPLING
    if tail.over_sampling_ratio != "auto":
        ratio = float(tail.over_sampling_ratio)
    # Before its last short round all but one group of a step may be waiting.
    beyond = math.ceil((scaled(workload.num_prompts, ratio) - 1) / workload.num_prompts)
    available = len(workload.batches) - beyond
    if available <= 0:
        raise InputError(
            f"tail_batching.enabled: {workload.num_steps} recorded steps; {beyond + 1} are needed"
        )
    return min(workload.num_steps, available)


def counted(steps: list[SimulatedStep]) -> list[SimulatedStep]:
    """Return the steps up to the last long round, or all without one.

    After a long round almost no deferred sample, whose cost is counted, is left untrained."""
    longs = [number for number, step in enumerate(steps) if step.is_long_round]
    return steps[: longs[-1] + 1] if longs else steps


def _check(config: Config, workload: Workload, num_ranks: int) -> None:
    rollout = config.rollout
    given = (rollout.num_prompts_per_step, rollout.num_generations)
    there = (workload.num_prompts, workload.num_generations)
    if given != there:
        names = "num_prompts_per_step, num_generations"
        raise InputError(f"rollout.{names}: {given}, but the workload has {there}")
    if not 1 <= num_ranks <= workload.num_prompts:
        raise InputError(f"--ranks: {num_ranks} for {workload.num_prompts} prompts per step")
    if isinstance(rollout.max_num_seqs, str):
        rollout.max_num_seqs = max_slots(config, num_ranks)


def _blank(row: Row) -> np.ndarray:
    """Return a text without stop tokens, for rows that are only timed."""
    return np.zeros(row.max_new_tokens, np.int64)


@dataclass
class _Shared:
    """What all ranks of a simulated run share."""

    config: Config
    workload: Workload
    cost: Cost
    together: Cost | None
    drafter: DrafterModel | None
    quantized: CopyModel
    copy_cost: Cost | None
    reward_cost: Cost | None
    prices: Prices
    profiled: CostModel = field(default_factory=CostModel)  # what a run fits at its start
    tp_cost: CostModel | None = None  # of all ranks together; None: the tail begins by rows

    @property
    def tail_rows(self) -> int:
        """Largest number of rows of all ranks with which the TP tail begins; 0: no tail."""
        rows = self.config.rollout.tp_tail_max_rows
        return AUTO_ROWS if isinstance(rows, str) else rows

    def engine(self, ranks: SimulatedRanks, text: Text, *, is_tail: bool = False) -> Engine:
        """Create one rank's engine, or its engine of the TP tail."""
        rollout = self.config.rollout
        count = self.tail_rows if is_tail else int(rollout.max_num_seqs)
        runner = SimulatedRunner(
            ranks,
            num_slots=count,
            max_length=self.workload.max_prompt_length + rollout.max_completion_length,
            max_num_batched_tokens=max(rollout.max_num_batched_tokens, count),
            cost=self.cost,
            text=text,
            together=self.together if is_tail else None,
            prices=self.prices,
        )
        return Engine(runner)

    def time_forwards(self) -> None:
        """Time forwards as a run does at its start; costs are equal on all ranks."""
        ranks, params, rollout = SimulatedRanks(World(1), 0), SamplingParams(), self.config.rollout
        alone = self.engine(ranks, _blank)
        if rollout.tp_tail_max_rows == "auto":
            self.tp_cost = measure(self.engine(ranks, _blank, is_tail=True), alone, params, ranks)
            if self.tp_cost is None:
                rollout.tp_tail_max_rows = 0
        if self.config.has_drafts:
            profile(alone, params, self.profiled, clock=ranks.clock)


class _Rank:
    """One rank: its sampler and, as the sampler's scorer, the workload's rewards."""

    takes_environments = False

    def __init__(self, shared: _Shared, ranks: SimulatedRanks):
        self.workload, self.texts, self.ranks = (
            shared.workload,
            SimulatedTexts(shared.workload),
            ranks,
        )
        self._finished: set[SampleId] = set()  # of the rollout
        config, engine = shared.config, shared.engine(ranks, self.texts.of_row)
        stand_ins: list[Any] = [self.workload, self]  # of a PromptSet and a Scorer
        run = Run(config, ranks, virtual=self._stand_ins(shared, engine))
        call("load", run)
        schedule = make_schedule(run, stand_ins[0])
        # Sorted so that a prompt's earliest visit is written last and kept.
        visits = Counter(dict(sorted(self.workload.steps, reverse=True)))
        schedule.load_state_dict(schedule.state_dict() | save_visits(visits))
        self.pools = list(run.rewards.values())
        board = None
        if config.has_drafts or shared.tail_rows or config.scores_in_rollouts:
            board = ProgressSync(ranks, config.run.timeout_s, SimulatedTicks(ranks))
        self.sampler = run.sampler = make_sampler(
            config,
            ranks,
            engine,
            SamplingParams(stop_token_ids=self.workload.stop_token_ids),
            schedule,
            stand_ins[1],
            reward_weights=[1.0],
            board=board,
            cost=copy.deepcopy(shared.profiled),
        )
        add_mechanisms(run)
        ranks.barrier()

    def _stand_ins(self, shared: _Shared, engine: Engine) -> dict[str, Any]:
        """Return what mechanisms find in `Run.virtual`."""
        config, ranks, stand_ins = shared.config, self.ranks, dict[str, Any]()
        if shared.tail_rows:
            # The cost of a forward contains its exchanges.
            gather = SimulatedRanks(ranks.world, ranks.rank, meeting_s=0.0).all_gather
            together = shared.engine(ranks, self.texts.of_row, is_tail=True)
            tail = TPTail(together, ranks, gather, shared.tail_rows, has_keys=False)
            stand_ins["tp_tail"], tail.cost = tail, shared.tp_cost
        if self.workload.has_tools:
            num_workers = max(config.environment.num_workers, 1)
            stand_ins["episodes"] = SimulatedEnvironments(ranks, self.texts, num_workers)
        if "quantized" in config.speculative.sources:
            stand_ins["quantized"] = copy_chains(engine, shared.quantized, shared.copy_cost)
        if shared.drafter is not None:
            stand_ins["drafter"] = partial(drafter_chains, model=shared.drafter)
        if shared.reward_cost is not None:
            max_tokens = config.reward.model_max_tokens_per_batch
            model = SimulatedRewardModel(ranks, shared.reward_cost, max_tokens)
            stand_ins["reward_models"] = pool = ModelPool(model, ranks.clock)
            pool.timed([np.zeros(max_tokens, np.int64)])  # as a run's trial call does
        return stand_ins

    def sees_groups(self, step: int | None) -> bool:
        return False

    def begin(self, launch: StepBatch, step: int) -> SimpleNamespace:
        """Begin to score a rollout, as `RewardManager.begin` does; returns a `RolloutRewards`."""
        self.texts.begin(step, launch.groups)
        runner: Any = self.sampler.engine.runner
        runner.own = frozenset(group.name for group in launch.groups)
        runner.advance(runner.prices.rollout_s)
        self._finished.clear()
        return SimpleNamespace(on_finished=self._on_finished, collect=self._collect)

    def _on_finished(self, row: Row) -> None:
        """Assert that a row equals its response, whatever was drafted; begin to score it."""
        assert np.array_equal(row.tokens, self.texts.text(row.id, row.max_new_tokens)), row.id
        self._finished.add(row.id)
        prompt: Any = row.prompt  # ids, of which the stand-in needs the number alone
        tokens: Any = row.tokens
        for pool in self.pools:
            pool.submit([Sample(prompt, tokens, [], {})])

    def _collect(self, rows: list[Row]) -> np.ndarray:
        """Return rewards, float64 [rows, 1]."""
        for row in rows:
            if row.id not in self._finished:
                self._on_finished(row)
        for pool in self.pools:
            pool.finish(self.ranks)
        rewards = [self.workload.rewards.get(self.workload.key(row.id), 0.0) for row in rows]
        return np.array(rewards, np.float64).reshape(-1, 1)

    def run_step(self, step: int) -> SimulatedStep:
        """Run a step, on all ranks together; the figures are equal on all of them."""
        ranks, record = self.ranks, self.sampler.sample(step)
        self.texts.end(record.generated.groups)
        (rollout,), (gen, wait, reward) = record.rollouts, record.stages
        end_s = reward.end_s if self.pools else wait.end_s
        spans, waited_s = rollout.spans, rollout.wait_s + wait.end_s - wait.begin_s
        if wait.end_s > wait.begin_s:  # for the slowest rank, once its own idle work is over
            spans.append(wait)
        counts = rollout.acceptance
        own = [end_s - gen.begin_s, rollout.own_forwards, waited_s]
        own += [rollout.drafted_tokens, counts.draft_tokens, counts.accepted_tokens]
        gathered = ranks.all_gather(np.array(own, np.float64))
        seconds, forwards = gathered[:, :2].max(axis=0).tolist()
        drafted, proposed, accepted = gathered[:, 3:].sum(axis=0).astype(int).tolist()
        lane = [
            (KINDS.index(kind), begin - gen.begin_s, end - gen.begin_s)
            for kind, begin, end in spans
        ]
        lanes = ranks.gather_ragged(np.array(lane, np.float64).ravel())
        planned = self.sampler.schedule.metrics()
        return SimulatedStep(
            step=step,
            seconds=seconds,
            forwards=int(forwards),
            shared_forwards=len(rollout.shared_forwards),
            idle_share=float(gathered[:, 2].mean() / seconds),
            drafted_tokens=drafted,
            proposed_tokens=proposed,
            refused_tokens=proposed - accepted,
            response_tokens=int(record.generated.lengths.sum()),
            is_long_round=bool(planned.get("tail/is_long_round", False)),
            length_ratio=planned.get("tail/length_ratio", 1.0),
            digest=digest(record.generated),
            lanes=[lane.reshape(-1, 3) for lane in lanes],
        )
