"""The TP (tensor-parallel) tail: all ranks decode the last rows together, in shards.

All ranks decide to enter the tail at a tick, by shared data. All ranks get the tokens of all
unfinished rows, and the keys and values of the heads that they read, and continue in an engine
that is the same on every rank. Its forwards are in lockstep: ranks exchange whatever could differ,
and compute the same tokens from the exchanged values. The owner of a row proposes its drafts, and
every few forwards ranks exchange whether to stop. When the last row is done, each rank has its own
rows' results, and the rollout ends with the next tick.

Shape legend: R rows of all ranks, n positions of one rank's rows, P ranks.
"""

import contextlib
from collections.abc import Callable, Collection, Container
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import Proposer, fill, numbers_of
from bubblespec.engine.arrays import median_s, ragged, to_device
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.errors import log
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.tp_tail.shards import ShardedForward, TPGroup, TPUnsupported, no_tp_tail
from bubblespec.memory import Needs, kv_bytes, max_length
from bubblespec.planner.chooser import DRAFTS
from bubblespec.planner.costs import CostModel, play
from bubblespec.planner.lengths import LengthForecast
from bubblespec.planner.windows import choose_windows
from bubblespec.records import Span, StepRecord, total_s
from bubblespec.rollout.board import RankState
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.plan import Mechanism, RolloutPlan
from bubblespec.rollout.profile import profile
from bubblespec.rollout.sampler import Sampler
from bubblespec.rollout.table import RolloutProgress, gather_rows
from bubblespec.types import Row, SampleId

NAME = "tp_tail"
AUTO_ROWS = 16  # of all ranks, with rollout.tp_tail_max_rows=auto
MIN_TAIL_GAIN = 0.05  # share of the rollout's rest; less is within the error of a cost model
OVERHEAD_TICKS = 2.0  # from a decision to the first forward
STOP_INTERVAL = 8  # forwards between two checks for a stop request on any rank
MAX_DRAFT_TOKENS = 64  # of a row
# Latest tokens of a row that are fed again for companions, which may need their hidden states.
FED_AGAIN = 16
CHANCES = 1 << 20  # by which chances are multiplied to be exchanged as whole numbers
ROWS = "tp_tail_rows"  # in a rollout's extras: rows of this rank that were unfinished on entry
NUM_TIMED = 3  # last forwards of a timing at the start, which count
PIECE_BYTES = 1 << 26  # received by a rank at a time from all ranks


class TPTail(Mechanism):
    """The engine of all ranks together, and the take-over that uses it."""

    name = NAME
    needs_timings = True

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        gather: Callable[[np.ndarray], np.ndarray],
        max_rows: int,
        has_keys: bool = True,
    ):
        """gather: see `OwnersPropose`; max_rows: rows of all ranks on entry, at most the slots.

        has_keys: whether runners are `ModelRunner`s, which they are not in virtual time."""
        self.engine, self.ranks, self.gather, self.max_rows = engine, ranks, gather, max_rows
        self.has_keys = has_keys
        self.sampler: Sampler | None = None
        self.cost: CostModel | None = None
        """Cost of forwards of all ranks together, by which the tail is entered; None: always."""
        self.off: frozenset[str] = frozenset()  # see `RolloutPlan.without`
        self.followers: list[Callable[[Engine], AbstractContextManager]] = []
        """Contexts in which draft sources follow the rows to another engine."""

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Take over the end of the rollout, unless a tail entered by cost is left out."""
        self.off = plan.without
        if self.cost is None or DRAFTS not in plan.without:
            plan.take_over = self

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        """Return rows, forwards and seconds of shared decoding; nothing in steps without."""
        shared = [rollout for rollout in record.rollouts if rollout.shared]
        if not shared:
            return {}
        return {
            "tp_tail/rows": sum(rollout.extras[ROWS] for rollout in shared),
            "tp_tail/forwards": sum(len(rollout.shared_forwards) for rollout in shared),
            "timing_s/tp_tail": sum(total_s(rollout.shared, "shared") for rollout in shared),
        }

    @property
    def tokens_fed_again(self) -> int:
        """Tokens of each row that are fed again on entry."""
        return FED_AGAIN if self.followers else 0

    def is_due(self, table: RolloutProgress, states: list[RankState]) -> bool:
        """Whether all ranks enter the tail at this tick; never if the launch selects groups."""
        if table.launch.selects or any(state.must_stop for state in states):
            return False
        return self.is_near(table) and (self.cost is None or self._is_worth_it(table, self.cost))

    def is_near(self, table: RolloutProgress) -> bool:
        """Whether rows are left, and few enough."""
        return bool(0 < (table.synced >= 0).sum() <= self.max_rows)

    def _is_worth_it(self, table: RolloutProgress, tp_cost: CostModel) -> bool:
        """Whether costs and predicted lengths of rows promise a gain; the same on every rank."""
        sampler = self.sampler
        assert sampler is not None and sampler.board is not None
        cost = sampler.stats.cost_without(self.off)
        if table.rows is None or cost is None:
            return False
        indices, rows = table.unfinished()
        overhead_s = OVERHEAD_TICKS * sampler.board.interval_s
        overhead_s += self.tokens_fed_again * len(rows) * float(tp_cost.coefficients[2])
        owners, num_slots = table.rank_of[indices], sampler.engine.num_slots
        return use_tp_tail(rows, owners, cost, tp_cost, num_slots=num_slots, overhead_s=overhead_s)

    def run(self, loop: RolloutLoop) -> None:
        """Generate the unfinished rows of all ranks to their end, all ranks together.

        On a stop request on any rank all leave, and rows keep their tokens so far. All ranks or
        none have a proposer."""
        ranks, engine, clock = self.ranks, self.engine, self.ranks.clock
        own_engine, proposer, record = loop.engine, loop.proposer, loop.record
        unfinished, began_s = loop.unfinished, clock.perf_counter()
        own_engine.collect()
        rows = gather_rows(unfinished, loop.table, ranks)
        if rows:  # otherwise all have ended since the tick
            self._insert([rows[index] for index in sorted(rows)], unfinished, own_engine)
        for row in [*own_engine.queue, *own_engine.rows[::-1]]:
            if row.number in unfinished:
                own_engine.drop(row)
        if not rows:
            return
        record.extras[ROWS], loop.last_s = len(unfinished), clock.perf_counter()
        with contextlib.ExitStack() as stack:
            for follow in self.followers:
                stack.enter_context(follow(engine))
            drafts = None
            if proposer is not None:
                drafts = OwnersPropose(proposer, unfinished, self.gather, engine, self.cost)
            while not engine.is_idle:
                is_asked = len(record.shared_forwards) % STOP_INTERVAL == 0
                if is_asked and self.gather(np.array([ranks.must_stop], np.uint8)).any():
                    break
                step_s, own_rows = clock.perf_counter(), len(unfinished)
                finished, load = engine.step(loop.plan.params, drafts)
                assert load is not None, "the engine is not idle"
                record.shared_forwards.append(loop.record_of(load, step_s, own_rows, 0))
                for row in finished:
                    if row.number in unfinished:
                        loop.finish(row)
        engine.collect()
        engine.reset()  # memory and graphs stay: capturing may take as long as the tail saves
        record.shared.append(Span("shared", began_s, clock.perf_counter()))

    def _insert(self, rows: list[Row], own: Container[int], own_engine: Engine) -> None:
        """Insert the rows of all ranks, with the keys and values that their ranks have."""
        engine, place = self.engine, enumerate(own_engine.rows)
        slots = {row.number: slot for slot, row in place if row.number in own}
        slot = np.array([slots.get(row.number, -1) for row in rows])
        latest = own_engine.length[slot] - 1 - self.tokens_fed_again
        kept = np.where(slot >= 0, np.minimum(own_engine.cached[slot], latest).clip(0), 0)
        source, target = (cast(ModelRunner, of.runner) for of in (own_engine, engine))
        can = not self.has_keys or can_transfer_kv(source, target)
        of_ranks = self.gather(np.append(kept, can))
        counts = of_ranks[:, :-1].max(axis=0) * of_ranks[:, -1].all()
        engine.reset()  # the weights have changed since the last time
        engine.insert(rows, counts)
        if self.has_keys and counts.any():
            rank_of = of_ranks[:, :-1].argmax(axis=0)
            transfer_kv(source, target, slot, counts, rank_of)


class OwnersPropose:
    """The engine's `Proposer` where all ranks have all rows: owners propose, all get all drafts.

    Windows are of all ranks' rows together, as one forward verifies them."""

    def __init__(
        self, proposer: Proposer, own_rows: Collection[int], gather: Callable, engine: Engine, cost
    ):
        """own_rows: numbers; gather: `Ranks.all_gather`, between forwards; engine: has the rows.

        cost: of its forwards, the same on all ranks; None: the first rank plans by its own."""
        self.proposer, self.own_rows, self.gather, self.cost = proposer, own_rows, gather, cost
        # Of all sources of this engine, used or not: all ranks must launch the same forwards.
        self.needs_results = any(of.needs_results and of.serves(engine) for of in proposer.sources)

    def propose(self, rows: list[Row], lengths, room, budget, in_flight):
        """See `Proposer`; drafts are exchanged in one size on all ranks."""
        numbers, found = numbers_of(rows), None
        own = self._own(numbers)
        drafts = np.full((len(rows), 1 + MAX_DRAFT_TOKENS), -1)  # behind the chance of the first
        room = np.minimum(room, MAX_DRAFT_TOKENS - in_flight)
        if len(own):
            found = self.proposer.find(numbers[own], room[own], budget, in_flight[own])
        if found is not None:
            tokens, counts = fill(found, found.count, in_flight[own])
            row, offset = ragged(counts)
            drafts[own, 0] = CHANCES * self.proposer.survival.estimates[found.kind]
            fits = offset < (room + in_flight)[own[row]]
            drafts[own[row[fits]], 1 + offset[fits]] = tokens[fits]
        chances, drafts = np.split(self.gather(drafts).max(axis=0), [1], axis=1)
        windows = np.maximum((drafts >= 0).sum(axis=1) - in_flight, 0)
        if not self.proposer.always:
            positions = int(lengths.sum()) + sum(len(row.prompt) for row in rows)
            chance, cost = chances[:, 0] / CHANCES, self.cost or self.proposer.cost
            windows = choose_windows(chance, windows, cost, positions, budget=budget)
            if self.cost is None:
                windows = self.gather(windows)[0]
        count = np.where(windows > 0, windows + in_flight, 0)
        return drafts[np.arange(MAX_DRAFT_TOKENS) < count[:, None]], count

    def observe(self, rows: list[Row], tokens, num_gained, num_draft, num_accepted) -> None:
        """See `Proposer`; own rows only."""
        own = self._own(numbers_of(rows))
        if len(own):
            tokens = tokens[np.isin(ragged(num_gained)[0], own)]
            counts = (of[own] for of in (num_gained, num_draft, num_accepted))
            self.proposer.observe([rows[i] for i in own], tokens, *counts)

    def _own(self, numbers: np.ndarray) -> np.ndarray:
        return np.isin(numbers, list(self.own_rows)).nonzero()[0]


def add_needs(needs: Needs, run: Run) -> Needs:
    """Add the keys and values of the tail's rows, of this rank's heads."""
    config, size = run.config, run.ranks.world_size
    if size == 1:
        return needs
    rows = config.rollout.tp_tail_max_rows
    shape = run.model.config.get_text_config(decoder=True)
    row = kv_bytes(shape, run.model.dtype.itemsize, size) * max_length(config)
    counts = (AUTO_ROWS, 0) if isinstance(rows, str) else (rows,)
    return replace(needs, shared_row=row, shared_rows=counts)


def make(run: Run) -> TPTail | None:
    """Create the tail; None with one rank, by its key, or where the model cannot be sharded.

    With auto also None where measured forwards show no gain. All ranks must call this together. In
    virtual time the tail is given."""
    tail: TPTail | None = _shard(run) if run.virtual is None else run.virtual.get(NAME)
    if tail is not None:
        tail.followers, tail.sampler = run.followers, run.sampler
    return tail


def _shard(run: Run) -> TPTail | None:
    """Return the tail on shards of the policy, with auto with the cost of its forwards."""
    config, ranks, engine, max_rows = run.config, run.ranks, run.sampler.engine, run.num_shared_rows
    wanted, eager = config.rows_together(ranks.world_size), config.rollout.enforce_eager
    # not if invariant: sums over ranks round
    if wanted == 0 or max_rows == 0 or config.model.batch_invariant:
        return None
    alone = cast(ModelRunner, engine.runner)
    ranks.activity = "set-up of the TP tail"
    try:
        tp = TPGroup(ranks)
        memory, limit = alone.forward.memory, max(alone.max_num_batched_tokens, max_rows)
        forward = ShardedForward(alone.model, tp, enforce_eager=eager, memory=memory)
        sizes = max_rows, alone.max_length, alone.seed
        runner = ModelRunner(alone.model, *sizes, forward=forward, max_num_batched_tokens=limit)
        forward.check()
    except TPUnsupported as error:
        if wanted != "auto" and ranks.is_main:
            log(f"warning: {no_tp_tail(error)}")
        return None
    tail = TPTail(Engine(runner), ranks, tp.gather_array, max_rows)
    if wanted == "auto":
        tail.cost = measure(tail.engine, engine, run.sampler.params, ranks)
        if tail.cost is None:
            tail.engine.release()
            return None
    ranks.before_end.append(runner.release)
    return tail


def use_tp_tail(
    rows: LengthForecast,
    rank_of: np.ndarray,
    cost: CostModel,
    tp_cost: CostModel,
    *,
    num_slots: int,
    overhead_s: float,
) -> bool:
    """Whether ranks together end the rollout sooner, by MIN_TAIL_GAIN and overhead_s at least.

    The same on every rank. The model of shared forwards, measured at the start of the run, includes
    the collectives of every layer. Lost idle time is not counted: by the time that few rows are
    left, its jobs have been assigned.

    rows: unfinished rows of all ranks; rank_of: int64 [S]; cost, tp_cost: of forwards of one rank,
    and of all together; num_slots: of one rank; overhead_s: from the decision to the first forward.
    Drafts shorten both ways by the same factor and are ignored; `cost` alone has the copy's chains.
    """

    alone_s = float(play(rows, cost, num_slots, rank_of=rank_of).max(axis=-1).mean())
    together_s = overhead_s + float(play(rows, tp_cost, len(rows)).mean())
    return alone_s - together_s > max(MIN_TAIL_GAIN * alone_s, overhead_s)


def measure(
    together: Engine, alone: Engine, params: SamplingParams, ranks: Ranks
) -> CostModel | None:
    """Measure forwards of all ranks together; None where one row is no faster than alone."""
    params = replace(params, stop_token_ids=())  # otherwise a stop token would end rows early
    seconds = [_seconds_of_a_forward(engine, params, ranks) for engine in (alone, together)]
    alone_s, together_s = ranks.all_gather(np.array(seconds)).max(axis=0).tolist()
    if together_s >= (1 - MIN_TAIL_GAIN) * alone_s:
        return None
    cost = CostModel()

    def any_rank(is_so: bool) -> bool:
        return bool(ranks.all_gather(np.array([is_so], np.uint8)).any())

    profile(together, params, cost, clock=ranks.clock, any_rank=any_rank)
    return CostModel.from_parameters(ranks.all_gather(cost.parameters).mean(axis=0))


def _seconds_of_a_forward(engine: Engine, params: SamplingParams, ranks: Ranks) -> float:
    """Measure a forward of one row, up to its result on the host."""
    engine.reset()
    limit = min(2 * NUM_TIMED, engine.max_length - 2)
    engine.add([Row(SampleId(0, 0, 0), (1, 1), limit)])
    timed = min(NUM_TIMED, limit)
    return median_s(partial(engine.step, params), None, ranks.clock, limit - timed, timed)


def can_transfer_kv(source: ModelRunner, target: ModelRunner) -> bool:
    """Whether the cache has the key/value heads that shards are cut from; not before a forward."""
    sharded, layers = cast(ShardedForward, target.forward), source.cache.layers.values()
    counts = {of.shape[2] for own in layers for of in (own.keys, own.values)}
    return counts == {sharded.num_key_heads}


@torch.inference_mode()
def transfer_kv(
    source: ModelRunner,
    target: ModelRunner,
    slots: np.ndarray,
    counts: np.ndarray,
    rank_of: np.ndarray,
) -> None:
    """Send first positions of rows into the target's first R slots; all ranks call this together.

    Each rank has the keys and values of its own rows, of all heads; in a forward in shards it reads
    some heads, but of all rows. Layer by layer the ranks exchange what they have, and each keeps
    its heads: a limited number of positions at a time, as memory is full by then.

    slots: int64 [R], of this rank's rows in the source; counts: int64 [R], positions, for which the
    target has room; rank_of: int64 [R], owners of the rows.
    """
    sharded, device = cast(ShardedForward, target.forward), source.device
    tp = sharded.tp
    own = np.flatnonzero(rank_of == tp.rank)
    row, position = ragged(counts[own])
    here = to_device(source.cache.places(slots[own][row], position), device)
    by_rank = np.argsort(rank_of, kind="stable")  # the order of the exchange
    row, position = ragged(counts[by_rank])
    places = target.cache.places(by_rank[row], position)
    sizes = np.bincount(rank_of, counts, tp.size).astype(np.int64)
    layers = source.cache.layers
    largest = max(of[0, 0].nbytes for own in layers.values() for of in (own.keys, own.values))
    at_once = max(PIECE_BYTES // (tp.size * largest), 1)
    width = min(at_once, int(sizes.max()))  # positions of each rank in a piece
    piece = ragged(sizes)[1] // width
    there = to_device(places[np.argsort(piece, kind="stable")], device).split(
        np.bincount(piece).tolist()
    )

    def of_all_ranks(cached: torch.Tensor, heads: slice, begin: int) -> torch.Tensor:
        """Gather the piece at this position of every rank, [positions, own heads, dimension]."""
        own = cached[source.cache.locate(here[begin : begin + width])]
        part = cached.new_zeros(width, *cached.shape[2:])
        part[: len(own)] = own
        parts = zip(tp.gather(part), (sizes - begin).clip(0).tolist(), strict=True)
        return torch.cat([of_rank[:left, heads] for of_rank, left in parts])

    for layer, own_cache in layers.items():
        both = own_cache.keys, own_cache.values
        for number, of_piece in enumerate(there):
            pair = (of_all_ranks(of, sharded.key_heads, number * width) for of in both)
            target.cache.write(layer, of_piece, *pair)
