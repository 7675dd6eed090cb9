"""A run's rollouts in virtual time: every rank runs the real scheduling code, on an engine that knows what will be said."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from bubblespec.config import Config
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError
from bubblespec.idle.speculation import Speculation, profile
from bubblespec.memory import most_slots
from bubblespec.records import Row
from bubblespec.rollout.loop import RolloutStats
from bubblespec.rollout.placement import assign_prompts, digest, gather_samples, generate, make_rows
from bubblespec.simulate.runner import SimulatedGenerator, SimulatedRunner, SimulatedSpeculator
from bubblespec.simulate.world import SimulatedBoard, SimulatedRanks, World
from bubblespec.speculate.store import DraftStore
from bubblespec.speculate.suffix import History
from bubblespec.speculate.windows import CostModel
from bubblespec.telemetry.timeline import KINDS, Event, note


@dataclass
class SimulatedStep:
    """One step's rollout. seconds: from its begin to the end of its last rank; forwards: of the rank with most of them before its
    own rows were done; bubble_ratio: share of the rollout that ranks spent waiting; drafted_tokens: for coming steps;
    proposed_tokens, refused_tokens: draft tokens under verification; response_tokens: of all responses; lanes: see `draw` in
    timeline.py."""

    step: int
    seconds: float = 0.0
    forwards: int = 0
    bubble_ratio: float = 0.0
    drafted_tokens: int = 0
    proposed_tokens: int = 0
    refused_tokens: int = 0
    response_tokens: int = 0
    digest: str = ""
    lanes: list[np.ndarray] = field(default_factory=list, repr=False)


def simulate(
    config: Config, workload, cost, num_ranks: int, cores: int | None = None, shows_progress: bool = False
) -> list[SimulatedStep]:
    """All steps of a workload (`Workload` or `RecordedWorkload`), which it ends with as a run does with run.max_steps.

    cost: an object with seconds(load), and with propose_seconds(rows) where proposals take time; cores: see `World`. Training,
    rewards and the moving of drafts take no time here. Raises InputError where the configuration does not fit the workload.
    """
    _check(config, workload, num_ranks)
    config = copy.deepcopy(config)
    config.run.max_steps = workload.first_step + workload.num_steps
    world = World(num_ranks, cores)
    steps = [SimulatedStep(step) for step in range(workload.first_step, workload.first_step + workload.num_steps)]
    total = sum(_length(workload, step.step, config.rollout.max_completion_length) for step in steps)
    profiled = None if config.speculative.method == "none" else _profiled(config, workload, cost, world)
    with tqdm(total=total, unit="tok", unit_scale=True, desc=config.speculative.method, disable=not shows_progress) as bar:
        world.run(lambda rank: _Rank(config, workload, cost, profiled, world, rank, bar).run(steps))
    return steps


def _profiled(config: Config, workload, cost, world: World) -> CostModel:
    """What `profile` measures at the start of a run. All ranks do that at the same time, so where they share cores all are
    busy; and all measure the same, so once is enough."""
    slowdown = 1.0 if world.cores is None else max(1.0, world.num_ranks / world.cores)
    slowed = SimpleNamespace(seconds=lambda load: slowdown * cost.seconds(load))
    alone, profiled = World(1), CostModel()
    engine = _make_engine(config, workload, slowed, alone, 0, world.num_ranks, _endless)
    # With these parameters nothing ends a row: the workload's stop token may be 0.
    profile(engine, SamplingParams(), profiled, clock=SimulatedRanks(alone, 0).clock)
    return profiled


def _endless(row: Row, so_far: np.ndarray) -> np.ndarray:
    return np.zeros(row.max_new_tokens, np.int64)


def _make_engine(config: Config, workload, cost, world: World, rank: int, num_ranks: int, text) -> SimulatedGenerator:
    rollout = config.rollout
    num_slots = most_slots(config, num_ranks) if rollout.num_slots == "auto" else rollout.num_slots
    max_length = workload.max_prompt_length + rollout.max_completion_length
    return SimulatedGenerator(SimulatedRunner(world, rank, num_slots, max_length, rollout.max_batch_tokens, cost, text))


def _check(config: Config, workload, num_ranks: int) -> None:
    for key in ("num_prompts_per_step", "num_generations"):
        there = getattr(workload, key.replace("_per_step", ""))
        if getattr(config.rollout, key) != there:
            raise InputError(f"rollout.{key}: {getattr(config.rollout, key)}, but the workload has {there}")
    if workload.num_prompts < num_ranks:
        raise InputError(f"--ranks: {num_ranks} ranks for {workload.num_prompts} prompts a step; give at most that many ranks")
    slots = most_slots(config, num_ranks) if config.rollout.num_slots == "auto" else config.rollout.num_slots
    if config.rollout.max_batch_tokens < slots:
        raise InputError(f"rollout.max_batch_tokens: {config.rollout.max_batch_tokens} is below the {slots} slots")


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

    def __init__(self, config: Config, workload, cost, profiled: CostModel | None, world: World, rank: int, bar: tqdm):
        self.config, self.workload, self.version, self.bar = config, workload, workload.first_step, bar
        self.ranks = SimulatedRanks(world, rank)
        self.engine = _make_engine(config, workload, cost, world, rank, world.num_ranks, self._text)
        self.sampling = SamplingParams(stop_token_ids=workload.stop_token_ids)
        self.speculation = None if profiled is None else self._make_speculation(cost, copy.deepcopy(profiled))
        self.ranks.barrier()

    def _make_speculation(self, cost, profiled: CostModel) -> Speculation:
        speculative, clock = self.config.speculative, self.ranks.clock
        propose_seconds = getattr(cost, "propose_seconds", None)
        speculator = SimulatedSpeculator(
            speculative.method, profiled, speculative.fixed_window, clock, propose_seconds=propose_seconds
        )
        speculator.history = History(speculative.max_history_tokens)
        board = SimulatedBoard(self.ranks, self.config.bubble.progress_timeout_s)
        store = DraftStore(self.config.bubble.max_draft_tokens)
        return Speculation(self.config, self.ranks, board, speculator, store, speculator.history)

    def _text(self, row: Row, so_far: np.ndarray) -> np.ndarray:
        return self.workload.draft(
            row.id.visit, row.id.uid, row.id.sample, row.id.visit - self.version, row.max_new_tokens, so_far
        )

    def run(self, steps: list[SimulatedStep]) -> None:
        for step in steps:
            self._run_step(step)
            if self.ranks.is_main:
                self.workload.forget(step.step - 1)  # all ranks have left the step before

    def _run_step(self, result: SimulatedStep) -> None:
        step, ranks, rollout, clock = result.step, self.ranks, self.config.rollout, self.ranks.clock
        self.version = step
        prompts = self.workload.batch(step)
        own = [prompts[number] for number in assign_prompts(len(prompts), ranks.world_size)[ranks.rank]]
        rows = make_rows(own, step, self.workload.num_generations, rollout.max_completion_length)
        began, forwards_before = clock.perf_counter(), self.engine.num_forwards
        stats, drafts = self._generate(rows, step)
        stats.own_forwards = stats.own_forwards or self.engine.num_forwards - forwards_before
        generated = clock.perf_counter()
        ranks.meet()
        ended = clock.perf_counter()
        if ended > generated:
            note(stats.events, "wait", generated, ended)
        rewards = np.concatenate([self.workload.rewards(step, prompt.uid) for prompt in own])
        samples = gather_samples(prompts, self.workload.num_generations, rows, rewards[:, None], ranks)
        counts = [0, 0]
        if self.speculation is not None:
            found = self.speculation.speculator.stats
            counts = [found.num_draft, found.num_draft - found.num_accepted]
            self.speculation.exchange(drafts, stats)
            self.speculation.learn(step, prompts, samples.tokens, samples.rewards[:, 0])
        waited = stats.wait_s + ended - generated
        numbers = ranks.gather(np.array([ended - began, stats.own_forwards, waited, stats.drafted_tokens, *counts], np.float64))
        lanes = ranks.gather_ragged(_lane(stats.events, began))
        if ranks.is_main:
            result.seconds = float(numbers[:, 0].max())
            result.forwards = int(numbers[:, 1].max())
            result.bubble_ratio = float(numbers[:, 2].mean() / result.seconds)
            result.drafted_tokens, result.proposed_tokens, result.refused_tokens = numbers[:, 3:].sum(axis=0).astype(int).tolist()
            result.response_tokens = int(samples.lengths.sum())
            result.digest = digest(samples)
            result.lanes = [lane.reshape(-1, 3) for lane in lanes]

    def _generate(self, rows: list[Row], step: int) -> tuple[RolloutStats, dict]:
        if self.speculation is None:
            stats = RolloutStats()
            generate(self.engine, rows, self.sampling, self.ranks, self._count, stats.events)
            return stats, {}
        return self.speculation.rollout(self.engine, rows, self.sampling, step, self.workload.batch, self._count)

    def _count(self, row: Row) -> None:
        """A row is done. Whatever was drafted, it must be the response."""
        true = self.workload.response(row.id.visit, row.id.uid, row.id.sample)[: row.max_new_tokens]
        if not np.array_equal(row.tokens, true):
            raise AssertionError(f"sample {row.id.sample} of prompt {row.id.uid} in step {row.id.visit} is not its response")
        self.bar.update(len(row.tokens))


def _lane(events: list[Event], began: float) -> np.ndarray:
    return np.array([(KINDS.index(kind), begin - began, end - began) for kind, begin, end in events], np.float64).ravel()
