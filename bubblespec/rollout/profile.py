"""Timing of forwards before the first rollout."""

import itertools
from dataclasses import replace

import numpy as np

from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import SamplingParams
from bubblespec.planner.costs import CostModel
from bubblespec.types import Row, SampleId

NUM_FORWARDS, FEW_TOKENS = 3, 64  # timed forwards of each kind; one of those above FEW_TOKENS
WINDOWS = (0, 3, 15)  # draft tokens of a row
# For short rows that feed few tokens together, whose cost has steps (mechanisms/cpu_linear.py).
MORE_WINDOWS = (1, 2, 5, 7)


class _MeaninglessDrafts:
    """Proposes drafts of one length, to time forwards."""

    def __init__(self, length: int):
        self.length = length

    def propose(self, rows, lengths, room, budget, ahead):
        counts = np.full(len(rows), self.length)
        return np.ones(int(counts.sum()), np.int64), counts

    def observe(self, rows, tokens, num_gained, num_draft, num_accepted):
        pass


def profile(engine: Engine, params: SamplingParams, cost: CostModel, *, clock) -> None:
    """Time forwards of few and many rows, short and long ones, with short and long drafts.

    Long rows are not timed with the longest drafts: the others show the cost of positions. Short
    rows that feed few tokens have drafts of more lengths. Each kind is run once before it counts.
    """
    params = replace(params, stop_token_ids=())  # otherwise a stop token would end rows early
    capacity, length = engine.num_slots, engine.max_length
    counts = sorted({1, max(1, capacity // 4), capacity})
    sizes = sorted({min(8, length - 1), min(512, length // 2)})
    for count, size, window in itertools.product(counts, sizes, sorted(WINDOWS + MORE_WINDOWS)):
        num_tokens = count * (window + 1)
        is_too_long = size + window + NUM_FORWARDS + 2 > length
        is_left_out = size > sizes[0] and window == WINDOWS[-1]
        is_left_out |= window in MORE_WINDOWS and (size > sizes[0] or num_tokens > FEW_TOKENS)
        if is_too_long or is_left_out or num_tokens > engine.max_num_batched_tokens:
            continue
        engine.reset()
        drafts = _MeaninglessDrafts(window)
        rows = [Row(SampleId(0, 0, n), (1,) * size, length - size) for n in range(count)]
        engine.add(rows)
        engine.step(params, drafts)  # admits rows while pages last
        while (engine.lengths <= size).any():
            engine.step(params, drafts)
        for _ in range(NUM_FORWARDS if num_tokens <= FEW_TOKENS else 1):
            began_s = clock.perf_counter()
            _, load = engine.step(params, drafts)
            if load is not None:
                cost.anchor(load, clock.perf_counter() - began_s)
    engine.reset()
