"""Timing of forwards before the first rollout."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.planner.costs import CostModel
from bubblespec.types import Row, SampleId

NUM_FORWARDS, FEW_TOKENS = 3, 64  # timed forwards of each kind; one of those above FEW_TOKENS
WINDOWS = (0, 3, 15)  # draft tokens of a row
# For short rows that feed few tokens together, whose cost has steps (mechanisms/cpu_linear.py).
MORE_WINDOWS = (1, 2, 5, 7)
LIMIT_S, LINE_S = 60.0, 10.0  # of all timing; between two lines of progress


class _MeaninglessDrafts:
    """Proposes drafts of one length, to time forwards."""

    def __init__(self, length: int):
        self.length = length

    def propose(self, rows, lengths, room, budget, in_flight):
        counts = np.full(len(rows), self.length)
        return np.ones(int(counts.sum()), np.int64), counts

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        pass


def profile(
    engine: Engine,
    params: SamplingParams,
    cost: CostModel,
    *,
    clock,
    show: Callable[[str], object] = lambda line: None,
    any_rank: Callable[[bool], bool] = bool,
) -> None:
    """Time forwards of few and many rows, short and long ones, with short and long drafts.

    Kinds are left out that would not end within LIMIT_S, by what is known of the cost by then.
    show: gets lines on the progress; any_rank: whether this is so on any of the ranks that run the
    same forwards."""
    params = replace(params, stop_token_ids=())  # otherwise a stop token would end rows early
    kinds = list(_kinds(engine))
    began_s = shown_s = clock.perf_counter()
    num_timed = 0
    for number, kind in enumerate(kinds):
        now_s = clock.perf_counter()
        left_s = LIMIT_S - (now_s - began_s)
        if number and any_rank(_seconds(cost, kind) > left_s):
            continue
        if now_s - shown_s > LINE_S:
            left_s = min(left_s, sum(_seconds(cost, other) for other in kinds[number:]))
            show(f"timing the engine: {number} of {len(kinds)} parts, about {left_s:.0f} s left")
            shown_s = now_s
        _time(engine, params, cost, kind, clock)
        num_timed += 1
    if num_timed < len(kinds):
        left_out = f"{len(kinds) - num_timed} of {len(kinds)} parts"
        show(f"timing the engine: left out {left_out}, which take more than {LIMIT_S:.0f} s")
    engine.reset()


def _kinds(engine: Engine) -> Iterator[tuple[int, int, int]]:
    """Yield length and number of rows, and draft tokens of a row: short rows first.

    Long rows are not timed with the longest drafts: the others show the cost of positions. Short
    rows that feed few tokens have drafts of more lengths."""
    capacity, length = engine.num_slots, engine.max_length
    counts = sorted({1, max(1, capacity // 4), capacity})
    sizes = sorted({min(8, length - 1), min(512, length // 2)})
    for size, count, window in itertools.product(sizes, counts, sorted(WINDOWS + MORE_WINDOWS)):
        num_tokens = count * (window + 1)
        is_too_long = size + window + NUM_FORWARDS + 2 > length
        is_left_out = size > sizes[0] and window == WINDOWS[-1]
        is_left_out |= window in MORE_WINDOWS and (size > sizes[0] or num_tokens > FEW_TOKENS)
        if not (is_too_long or is_left_out or num_tokens > engine.max_num_batched_tokens):
            yield size, count, window


def _seconds(cost: CostModel, kind: tuple[int, int, int]) -> float:
    """Return the predicted seconds of timing a kind. The rows have one prompt, fed once."""
    size, count, window = kind
    num_tokens, wide_rows = count * (window + 1), count if window else 0
    forward_s = cost.seconds(count, num_tokens, wide_rows, count * size + num_tokens)
    return cost.seconds(1, size, 1, size) + (1 + _num_timed(kind)) * forward_s


def _num_timed(kind: tuple[int, int, int]) -> int:
    _, count, window = kind
    return NUM_FORWARDS if count * (window + 1) <= FEW_TOKENS else 1


def _time(
    engine: Engine, params: SamplingParams, cost: CostModel, kind: tuple[int, int, int], clock
) -> None:
    """Time forwards of one kind, which is run once before it counts."""
    size, count, window = kind
    engine.reset()
    drafts = _MeaninglessDrafts(window)
    rows = [Row(SampleId(0, 0, n), (1,) * size, engine.max_length - size) for n in range(count)]
    engine.add(rows)
    engine.step(params, drafts)  # admits rows while pages last
    while (engine.lengths <= size).any():
        engine.step(params, drafts)
    for _ in range(_num_timed(kind)):
        began_s = clock.perf_counter()
        _, load = engine.step(params, drafts)
        if load is not None:
            cost.anchor(load, clock.perf_counter() - began_s)
