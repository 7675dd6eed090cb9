"""A run's rollouts in virtual time: every rank runs the real scheduling code, on an engine that
knows what will be said."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm

from bubblespec.config import Config
from bubblespec.draft.learned import LearnedDrafts
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError
from bubblespec.memory import most_slots
from bubblespec.memory_needs import AUTO_SHARED_ROWS
from bubblespec.planner.costs import CostModel
from bubblespec.records import Span
from bubblespec.rollout.board import ProgressBoard
from bubblespec.rollout.make_sampler import make_sampler
from bubblespec.rollout.profile import profile
from bubblespec.rollout.tp_tail import TPTail, expects_gain
from bubblespec.simulate.deferral import Texts, make_schedule, steps_that_fit
from bubblespec.simulate.drafter import SimulatedChains
from bubblespec.simulate.runner import ProposalTime, SimulatedGenerator, SimulatedRunner
from bubblespec.simulate.shared import SharedCost
from bubblespec.simulate.world import SimulatedRanks, SimulatedTicks, World
from bubblespec.telemetry.timeline import KINDS
from bubblespec.types import Group, Row, digest


@dataclass
class SimulatedStep:
    """One step's rollout."""

    step: int
    seconds: float = 0.0
    """From its begin to the end of its last rank."""
    forwards: int = 0
    """Of the rank with most of them before its rows of this step were done."""
    bubble_ratio: float = 0.0
    """Share of the rollout that ranks spent waiting."""
    drafted_tokens: int = 0
    """For coming steps."""
    proposed_tokens: int = 0
    """Draft tokens under verification."""
    refused_tokens: int = 0
    """Of these, those that were not accepted."""
    response_tokens: int = 0
    """Of all responses that are trained on."""
    longest_tokens: int = 0
    """Of the longest of these."""
    is_long_round: bool = False
    """Of tail batching; so are the next two."""
    num_deferred: int = 0
    """Prompts that wait for a long round."""
    length_ratio: float = 1.0
    """Mean length of all responses trained on so far over that of all launched, as far as those
    have got."""
    digest: str = ""
    lanes: list[np.ndarray] = field(default_factory=list, repr=False)
    """By rank, see `draw` in timeline.py."""


def simulate(
    config: Config,
    workload,
    cost,
    num_ranks: int,
    *,
    cores: int | None = None,
    num_steps: int | None = None,
    shows_progress: bool = False,
) -> list[SimulatedStep]:
    """The steps of a workload (`Workload` or `RecordedWorkload`), the last of which ends it as
    run.max_steps does a run.

    cost: an object with seconds(load), and with propose_seconds(rows) where proposals take time;
    cores: see `World`; num_steps: by default `steps_that_fit`. Training, rewards and the moving of
    drafts take no time here. Raises InputError where the configuration does not fit the workload.
    """
    _check(config, workload, num_ranks)
    most = steps_that_fit(config, workload)
    config = copy.deepcopy(config)
    config.run.max_steps = workload.first_step + (most if num_steps is None else num_steps)
    config.rollout.dynamic_sampling = False  # the first rollout of each step is simulated
    config.reward.overlong_buffer_length = 0  # rewards are those of the workload
    world = World(num_ranks, cores)
    steps = [SimulatedStep(step) for step in range(workload.first_step, config.run.max_steps)]
    total = sum(
        _length(workload, step.step, config.rollout.max_completion_length) for step in steps
    )
    if workload.shared is None or num_ranks == 1:
        config.rollout.tp_tail_max_rows = 0
    profiled = None
    if _has_drafts(config) or config.rollout.tp_tail_max_rows != 0:
        profiled = _profiled(config, workload, cost, world)
    elif config.rollout.placement != "in_turn" and num_ranks > 1:
        profiled = (
            CostModel()
        )  # as in `make_speculation`: placement learns what forwards take from those of the run
    with tqdm(
        total=total,
        unit="tok",
        unit_scale=True,
        desc=config.speculative.method,
        disable=not shows_progress,
    ) as bar:
        world.run(
            lambda rank: _Rank(
                config, workload, cost, profiled, world=world, rank=rank, bar=bar
            ).run(steps)
        )
    return steps


def counted(steps: list[SimulatedStep]) -> list[SimulatedStep]:
    """Those up to the last long round, when next to nothing that has been paid for is waiting;
    without any, all."""
    longs = [number for number, step in enumerate(steps) if step.is_long_round]
    return steps[: longs[-1] + 1] if longs else steps


def _has_drafts(config: Config) -> bool:
    """Whether any rows have anything to verify."""
    return config.speculative.method != "none" or config.tail_batching.enabled


def _profiled(config: Config, workload, cost, world: World) -> CostModel:
    """What `profile` measures at the start of a run. All ranks do that at the same time, so where
    they share cores all are busy; and all measure the same, so once is enough."""
    slowdown = 1.0 if world.cores is None else max(1.0, world.num_ranks / world.cores)
    slowed = SimpleNamespace(seconds=lambda load: slowdown * cost.seconds(load))
    alone, profiled = World(1), CostModel()
    engine = _make_engine(
        config, workload, slowed, alone, rank=0, num_ranks=world.num_ranks, text=_endless
    )
    # With these parameters nothing ends a row: the workload's stop token may be 0.
    profile(engine, SamplingParams(), profiled, clock=SimulatedRanks(alone, 0).clock)
    return profiled


def _endless(row: Row, so_far: np.ndarray) -> np.ndarray:
    return np.zeros(row.max_new_tokens, np.int64)


def _make_engine(
    config: Config, workload, cost, world: World, *, rank: int, num_ranks: int, text
) -> SimulatedGenerator:
    rollout = config.rollout
    num_slots = most_slots(config, num_ranks) if rollout.num_slots == "auto" else rollout.num_slots
    max_length = workload.max_prompt_length + rollout.max_completion_length
    return SimulatedGenerator(
        SimulatedRunner(
            world,
            rank,
            num_slots,
            max_length,
            max_batch_tokens=rollout.max_batch_tokens,
            cost=cost,
            text=text,
        )
    )


def _check(config: Config, workload, num_ranks: int) -> None:
    for key in ("num_prompts_per_step", "num_generations"):
        there = getattr(workload, key.replace("_per_step", ""))
        if getattr(config.rollout, key) != there:
            raise InputError(
                f"rollout.{key}: {getattr(config.rollout, key)}, but the workload has {there}"
            )
    if workload.num_prompts < num_ranks:
        raise InputError(
            f"--ranks: {num_ranks} ranks for {workload.num_prompts} prompts a step; give at most that many ranks"
        )
    slots = (
        most_slots(config, num_ranks)
        if config.rollout.num_slots == "auto"
        else config.rollout.num_slots
    )
    if config.rollout.max_batch_tokens < slots:
        raise InputError(
            f"rollout.max_batch_tokens: {config.rollout.max_batch_tokens} is below the {slots} slots"
        )


def _length(workload, step: int, limit: int) -> int:
    lengths = [
        min(len(workload.response(step, prompt.uid, sample)), limit)
        for prompt in workload.batch(step)
        for sample in range(workload.num_generations)
    ]
    workload.forget(step)
    return sum(lengths)


class _Rank:
    """One rank's engine and speculation, from step to step."""

    def __init__(
        self,
        config: Config,
        workload,
        cost,
        profiled: CostModel | None,
        *,
        world: World,
        rank: int,
        bar: tqdm,
    ):
        self.workload, self.texts, self.bar = workload, Texts(workload), bar
        self.ranks = SimulatedRanks(world, rank)
        engine = _make_engine(
            config, workload, cost, world, rank=rank, num_ranks=world.num_ranks, text=self._text
        )
        engine.may_skip = (
            profiled is None
        )  # speculation learns from every forward, in rollouts without drafts as well
        board = None
        if profiled is not None:
            timeout_s = config.bubble.progress_timeout_s
            board = ProgressBoard(self.ranks, timeout_s, SimulatedTicks(self.ranks))
        self.sampler = make_sampler(
            config,
            self.ranks,
            engine,
            SamplingParams(stop_token_ids=workload.stop_token_ids),
            make_schedule(config, workload),
            self,
            reward_weights=[1.0],
            board=board,
            cost=CostModel() if profiled is None else copy.deepcopy(profiled),
        )
        if self.sampler.proposer is not None:
            self._add_sources(config, cost)
        if config.rollout.tp_tail_max_rows:
            self.sampler.tail = self._tail(config, cost, engine)
        self.ranks.barrier()

    def _add_sources(self, config: Config, cost) -> None:
        proposer, engine = self.sampler.proposer, self.sampler.engine
        if hasattr(cost, "propose_seconds"):
            proposer.sources.insert(0, ProposalTime(cost, self.ranks.clock))
        if "drafter" in config.speculative.method:
            chains = SimulatedChains(engine.runner, self.workload.drafter)
            drafts = LearnedDrafts(chains, engine, proposer.cost, self.ranks.clock)
            drafts.acceptance.expect(self.workload.drafter.accepted())
            drafts.profile()
            proposer.sources.append(drafts)

    def _tail(self, config: Config, cost, engine: SimulatedGenerator) -> TPTail:
        world, model, most_rows = (
            self.ranks.world,
            self.workload.shared,
            config.rollout.tp_tail_max_rows,
        )
        most_rows = AUTO_SHARED_ROWS if most_rows == "auto" else most_rows
        together = SharedCost(cost, model, world.num_ranks)
        limits = {"max_batch_tokens": engine.max_batch_tokens, "cost": together}
        runner = SimulatedRunner(
            world, self.ranks.rank, most_rows, engine.max_length, text=self._text, **limits
        )
        shared = SimulatedGenerator(runner)
        is_worth_it = None
        if config.rollout.tp_tail_max_rows == "auto":
            alone, profiled = World(1), CostModel()
            runner = SimulatedRunner(
                alone, 0, most_rows, engine.max_length, text=_endless, **limits
            )
            profile(
                SimulatedGenerator(runner),
                SamplingParams(),
                profiled,
                clock=SimulatedRanks(alone, 0).clock,
            )
            is_worth_it = expects_gain(self.sampler, profiled)
        ranks = SimulatedRanks(world, self.ranks.rank, model.exchange_us * 1e-6)
        tail = TPTail(shared, ranks, most_rows, config.rollout.max_completion_length, is_worth_it)
        for source in self.sampler.proposer.sources if self.sampler.proposer else ():
            if isinstance(source, LearnedDrafts):
                tail.draft_with(source, SimulatedChains(shared.runner, self.workload.drafter, cost))
        return tail

    def _text(self, row: Row, so_far: np.ndarray) -> np.ndarray:
        return self.texts.text(row.id, row.max_new_tokens, so_far)

    def run(self, steps: list[SimulatedStep]) -> None:
        for step in steps:
            self._run_step(step)
            if self.ranks.is_main:
                self.workload.forget(step.step - 1)  # all ranks have left the step before

    def _run_step(self, result: SimulatedStep) -> None:
        ranks, engine = self.ranks, self.sampler.engine
        forwards_before = engine.num_forwards
        record = self.sampler.sample(result.step)
        self.texts.end(record.generated.groups)
        (rollout,), (gen, wait, _) = record.rollouts, record.stages
        # Without speculation the engine takes many forwards at once.
        forwards = (
            engine.num_forwards - forwards_before if engine.may_skip else rollout.own_forwards
        )
        spans = rollout.spans
        if wait.end_s > wait.begin_s:
            spans.append(
                wait
                if not spans or spans[-1].kind != "wait"
                else Span("wait", spans.pop().begin_s, wait.end_s)
            )
        waited_s = rollout.wait_s + wait.end_s - wait.begin_s
        draft_tokens, accepted = rollout.acceptance.draft_tokens, rollout.acceptance.accepted_tokens
        counts = [rollout.drafted_tokens, draft_tokens, draft_tokens - accepted]
        numbers = ranks.gather(
            np.array([wait.end_s - gen.begin_s, forwards, waited_s, *counts], np.float64)
        )
        lanes = ranks.gather_ragged(_lane(spans, gen.begin_s))
        if ranks.is_main:
            result.seconds = float(numbers[:, 0].max())
            result.forwards = int(numbers[:, 1].max())
            result.bubble_ratio = float(numbers[:, 2].mean() / result.seconds)
            result.drafted_tokens, result.proposed_tokens, result.refused_tokens = (
                numbers[:, 3:].sum(axis=0).astype(int).tolist()
            )
            result.response_tokens = int(record.generated.lengths.sum())
            result.longest_tokens = int(record.generated.lengths.max())
            result.digest = digest(record.generated)
            planned = self.sampler.schedule.metrics()
            result.is_long_round = bool(planned.get("tail/is_long_round", False))
            result.num_deferred = planned.get("tail/num_deferred", 0)
            result.length_ratio = planned.get("tail/length_ratio", 1.0)
            result.lanes = [lane.reshape(-1, 3) for lane in lanes]

    def begin(self, groups: list[Group], step: int) -> "_Rewards":
        """As `Scorer.begin`."""
        self.texts.begin(step, groups)
        return _Rewards(self.workload, self.texts, self.bar)


@dataclass
class _Rewards:
    """As `Scoring`: the workload's rewards, which take no time. Whatever was drafted, a row must be
    its response."""

    workload: Any
    texts: Texts
    bar: tqdm

    def on_finished(self, row: Row) -> None:
        if not np.array_equal(row.tokens, self.texts.response(row.id, row.max_new_tokens)):
            raise AssertionError(f"{row.id} in step {self.texts.version} is not its response")
        self.bar.update(len(row.tokens))

    def collect(self, rows: list[Row]) -> np.ndarray:
        rewards = [
            self.workload.rewards(self.workload.step_of(row.id), row.id.uid)[row.id.sample]
            for row in rows
        ]
        return np.array(rewards, np.float64).reshape(-1, 1)


def _lane(spans: list[Span], began_s: float) -> np.ndarray:
    return np.array(
        [(KINDS.index(kind), begin - began_s, end - began_s) for kind, begin, end in spans],
        np.float64,
    ).ravel()
