"""Simulate the rollouts of a run: each rank runs the real sampler on an engine with known texts."""

import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule, save_visits
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError
from bubblespec.mechanisms.drafter.source import DrafterSource
from bubblespec.mechanisms.episodes.mechanism import EpisodesMechanism
from bubblespec.mechanisms.tail_batching import MAX_OVER_SAMPLING, TailBatching, scaled
from bubblespec.mechanisms.tp_tail.tail import TPTail, enter_by_cost, measure
from bubblespec.memory import AUTO_TP_ROWS, max_slots
from bubblespec.planner.costs import CostModel
from bubblespec.rollout.board import ProgressBoard
from bubblespec.rollout.make_sampler import make_sampler
from bubblespec.rollout.profile import profile
from bubblespec.telemetry.timeline import KINDS
from bubblespec.tools.simulate.runner import (
    Cost,
    DrafterModel,
    SimulatedDrafterRunner,
    SimulatedRunner,
    Text,
)
from bubblespec.tools.simulate.tools import SimulatedEnvironments
from bubblespec.tools.simulate.workload import Texts, Workload
from bubblespec.tools.simulate.world import SimulatedRanks, SimulatedTicks, World
from bubblespec.types import Launch, Row, digest


@dataclass
class SimulatedStep:
    """One step's rollout."""

    step: int
    seconds: float
    """Seconds from the begin of the rollout to the end of its last rank."""
    forwards: int
    """Forwards before a rank's own rows were done; the largest number of all ranks."""
    shared_forwards: int
    """Forwards of all ranks together, in the TP tail; not in `forwards`."""
    idle_share: float
    """Share of the rollout that ranks spent waiting."""
    drafted_tokens: int
    """Tokens drafted for later steps."""
    proposed_tokens: int
    """Draft tokens verified."""
    refused_tokens: int
    """Verified draft tokens that were rejected."""
    response_tokens: int
    """Tokens of the responses that are trained on."""
    is_long_round: bool
    """Whether tail batching makes this a long round."""
    length_ratio: float
    """Mean length of all responses trained on so far over that of all launched."""
    digest: str
    lanes: list[np.ndarray] = field(repr=False)
    """Spans by rank, see `draw` in timeline.py."""


def simulate(
    config: Config,
    workload: Workload,
    cost: Cost,
    num_ranks: int,
    *,
    together: Cost | None = None,
    drafter: DrafterModel | None = None,
    shows_progress: bool = False,
) -> list[SimulatedStep]:
    """Simulate the steps of a workload. Raises InputError if the configuration does not fit it.

    cost(load): seconds of a forward; together(load): seconds of a forward of all ranks together,
    None for no TP tail; drafter: used if the method has one. Training, rewards and the exchange of
    drafts take no time.
    """
    config = copy.deepcopy(config)
    config.run.max_steps = num_steps = steps_that_fit(config, workload)
    config.rollout.dynamic_sampling_max_batches = 1
    config.reward.overlong_buffer_length = 0
    if together is None or num_ranks == 1 or workload.tools is not None:
        config.rollout.tp_tail_max_rows = 0
    _check(config, workload, num_ranks)
    world, steps, tp_cost = World(num_ranks), [], None
    if config.rollout.tp_tail_max_rows == "auto":
        tp_cost = _measured_together(config, workload, cost, together)
        if tp_cost is None:
            config.rollout.tp_tail_max_rows = 0
    profiled = _profiled(config, workload, cost)
    costs = _Costs(cost, together, drafter or DrafterModel(), profiled, tp_cost)
    with tqdm(total=num_steps, unit="step", disable=None if shows_progress else True) as bar:

        def run_rank(rank: int) -> None:
            ranks = SimulatedRanks(world, rank)
            own = _Rank(config, workload, costs, ranks)
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
    ratio = tail.over_sampling_ratio
    ratio = MAX_OVER_SAMPLING if ratio == "auto" else float(ratio)
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

    After a long round almost no deferred sample, whose cost is counted, is left untrained.
    """
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
    if rollout.max_num_seqs == "auto":
        rollout.max_num_seqs = max_slots(config, num_ranks)
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise InputError(
            f"rollout.max_num_batched_tokens: {rollout.max_num_batched_tokens} is below the slots"
        )


def _has_drafts(config: Config) -> bool:
    """Whether rows have drafts to verify."""
    return config.speculative.method != "none" or config.tail_batching.enabled


def _engine(
    config: Config,
    workload: Workload,
    cost: Cost,
    ranks: SimulatedRanks,
    text: Text,
    together: Cost | None = None,
) -> Engine:
    """Make one rank's engine; with `together` the engine of the TP tail."""
    rollout, count = config.rollout, config.rollout.max_num_seqs
    if together is not None:
        count = _tail_rows(config)
    max_length = workload.max_prompt_length + rollout.max_completion_length
    options = {"cost": cost, "text": text, "together": together}
    options["max_num_batched_tokens"] = max(rollout.max_num_batched_tokens, count)
    return Engine(SimulatedRunner(ranks.world, ranks.rank, count, max_length, **options))


def _tail_rows(config: Config) -> int:
    """Return the largest number of rows of all ranks with which the TP tail begins; 0: no tail."""
    rows = config.rollout.tp_tail_max_rows
    return AUTO_TP_ROWS if rows == "auto" else rows


def _blank(row: Row, _: np.ndarray) -> np.ndarray:
    """Return a text without stop tokens, for rows that are only timed."""
    return np.zeros(row.max_new_tokens, np.int64)


def _profiled(config: Config, workload: Workload, cost: Cost) -> CostModel:
    """Measure forwards as a run does at its start; the costs are equal on all ranks."""
    profiled = CostModel()
    if _has_drafts(config):
        alone = SimulatedRanks(World(1), 0)
        engine = _engine(config, workload, cost, alone, _blank)
        profile(engine, SamplingParams(), profiled, clock=alone.clock)
    return profiled


def _measured_together(
    config: Config, workload: Workload, cost: Cost, together: Cost
) -> CostModel | None:
    """Measure forwards of all ranks together; see `measure`."""
    ranks = SimulatedRanks(World(1), 0)
    parts = (config, workload, cost, ranks, _blank)
    return measure(_engine(*parts, together), _engine(*parts), SamplingParams(), ranks)


@dataclass
class _Costs:
    """Costs of forwards, and the cost models that a run would have fitted to them."""

    alone: Cost
    together: Cost | None
    drafter: DrafterModel
    profiled: CostModel
    tp_cost: CostModel | None
    """None if the TP tail is not entered by cost."""


class _Rank:
    """One rank: its sampler and, as the sampler's scorer, the workload's rewards."""

    def __init__(
        self,
        config: Config,
        workload: Workload,
        costs: _Costs,
        ranks: SimulatedRanks,
    ):
        self.workload, self.texts, self.ranks = workload, Texts(workload), ranks
        parts = (config, workload, costs.alone, ranks, self._text)
        engine = _engine(*parts)
        order = (workload, 0, workload.num_prompts, workload.num_generations)
        schedule = StepSchedule(*order)
        if config.tail_batching.enabled:
            ratio = config.tail_batching.over_sampling_ratio
            schedule = TailBatching(*order, over_sampling_ratio=ratio)
        # Sorted so that a prompt's earliest visit is written last and kept.
        visits = Counter(dict(sorted(workload.steps, reverse=True)))
        schedule.load_state_dict(schedule.state_dict() | save_visits(visits))
        board = None
        if _has_drafts(config) or _tail_rows(config):
            board = ProgressBoard(ranks, config.run.timeout_s, SimulatedTicks(ranks))
        self.sampler = make_sampler(
            config,
            ranks,
            engine,
            SamplingParams(stop_token_ids=workload.stop_token_ids),
            schedule,
            self,
            reward_weights=[1.0],
            board=board,
            cost=copy.deepcopy(costs.profiled),
        )
        tail = None
        if _tail_rows(config):
            # The cost of a forward contains its exchanges.
            gather = SimulatedRanks(ranks.world, ranks.rank, meeting_s=0.0).gather
            together = _engine(*parts, costs.together)
            tail = TPTail(together, ranks, gather, _tail_rows(config), has_keys=False)
            if costs.tp_cost is not None:
                stats = self.sampler.stats
                enter_by_cost(tail, costs.tp_cost, stats, engine.num_slots, board)
            self.sampler.mechanisms.append(tail)
        if workload.tools is not None:
            num_workers = max(config.environment.num_workers, 1)
            environments = SimulatedEnvironments(ranks, self._whole_text, self._tool_s, num_workers)
            self.sampler.mechanisms.append(
                EpisodesMechanism(config, environments, engine, schedule, ranks.clock)
            )
        if "drafter" in config.speculative.sources:
            proposer = self.sampler.proposer
            runner = SimulatedDrafterRunner(engine, costs.drafter)
            source = DrafterSource(runner, proposer.cost, ranks.clock)
            source.profile()
            proposer.add(source)
            if tail is not None:
                together = SimulatedDrafterRunner(tail.engine, costs.drafter)
                tail.companions.append(lambda engine: source.moved_to(together))
        ranks.barrier()

    def _text(self, row: Row, so_far: np.ndarray) -> np.ndarray:
        return self.texts.text(row.id, row.max_new_tokens, so_far)

    def _whole_text(self, row: Row) -> np.ndarray:
        return self._text(row, row.tokens)

    def _tool_s(self, row: Row) -> float:
        return self.workload.tools.seconds(self.workload.key(row.id), len(row.tokens))

    sees_groups = takes_environments = False

    def begin(self, launch: Launch, step: int) -> SimpleNamespace:
        """As `Scorer.begin`; returns a `Scoring`."""
        self.texts.begin(step, launch.groups)
        return SimpleNamespace(on_finished=self._check_row, collect=self._collect)

    def _check_row(self, row: Row) -> None:
        """Assert that a row equals its response, whatever was drafted."""
        assert np.array_equal(row.tokens, self.texts.text(row.id, row.max_new_tokens)), row.id

    def _collect(self, rows: list[Row]) -> np.ndarray:
        """Return rewards, float64 [rows, 1]."""
        rewards = [self.workload.rewards.get(self.workload.key(row.id), 0.0) for row in rows]
        return np.array(rewards, np.float64).reshape(-1, 1)

    def run_step(self, step: int) -> SimulatedStep:
        """Run a step, on all ranks together; the figures are equal on all of them."""
        ranks, record = self.ranks, self.sampler.sample(step)
        self.texts.end(record.generated.groups)
        (rollout,), (gen, wait, _) = record.rollouts, record.stages
        spans, waited_s = rollout.spans, rollout.wait_s + wait.end_s - wait.begin_s
        if wait.end_s > wait.begin_s:  # for the slowest rank, once its own idle work is over
            spans.append(wait)
        counts = rollout.acceptance
        own = [wait.end_s - gen.begin_s, rollout.own_forwards, waited_s]
        own += [rollout.drafted_tokens, counts.draft_tokens, counts.accepted_tokens]
        gathered = ranks.gather(np.array(own, np.float64))
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
