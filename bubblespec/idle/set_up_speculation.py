"""Speculation at the start of a run: forwards are timed, and its parts put together."""

import itertools
import time
from collections.abc import Sequence

import numpy as np

from bubblespec.config import Config
from bubblespec.dist.ranks import Ranks
from bubblespec.draft.evaluation import make_evaluation_drafts
from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.store import DraftStore
from bubblespec.draft.suffix import History
from bubblespec.draft.windows import CostModel
from bubblespec.engine.engine import Engine
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.speculation import Speculation
from bubblespec.rollout.board import ProgressBoard
from bubblespec.types import Prompt, Row, SampleId


def make_speculation(
    config: Config,
    ranks: Ranks,
    engine: Engine,
    params: SamplingParams,
    held_out: Sequence[Prompt] = (),
) -> Speculation | None:
    """None where nothing is drafted, deferred, streamed, shared or placed by expectation. Makes a
    process group and times forwards: all ranks must call it together."""
    has_drafts = config.speculative.method != "none" or config.tail_batching.enabled
    shares_tail = config.rollout.tp_tail_max_rows not in (0, "auto") and ranks.world_size > 1
    if (
        not (has_drafts or shares_tail or config.optim.stream_gradients)
        and config.rollout.placement == "in_turn"
    ):
        return None
    cost = CostModel()
    if has_drafts:
        profile(engine, params, cost, clock=ranks.clock)
    bubble = config.bubble
    board = ProgressBoard(ranks, bubble.progress_timeout_s, bubble.progress_backend)
    return assemble(config, ranks, board, cost, held_out)


def assemble(
    config: Config,
    ranks: Ranks,
    board: ProgressBoard,
    cost: CostModel,
    held_out: Sequence[Prompt] = (),
) -> Speculation:
    """A run's speculation at its beginning. cost: of forwards, as profiled; held_out: prompts of
    evaluations."""
    speculative = config.speculative
    history = History(speculative.max_history_tokens)
    has_drafts = "bubble" in speculative.method or config.tail_batching.enabled
    options = {
        "has_drafts": has_drafts,
        "fixed_window": speculative.fixed_window,
        "clock": ranks.clock,
    }
    proposer = make_proposer(speculative.method, history, cost, **options)
    evaluation = make_evaluation_drafts(config, proposer, held_out)
    return Speculation(
        config,
        ranks,
        board,
        proposer,
        DraftStore(config.bubble.max_draft_tokens),
        history,
        evaluation,
    )


class _FixedDrafts:
    """Proposes meaningless drafts of one length: for timing forwards."""

    def __init__(self, length: int):
        self.length = length

    def propose(self, rows, lengths, room, budget):
        return [np.ones(self.length, np.int64)] * len(rows) if self.length else [None] * len(rows)

    def observe(self, rows, tokens, num_draft, num_accepted):
        pass


def profile(
    engine: Engine, params: SamplingParams, cost: CostModel, num_forwards: int = 3, *, clock=time
) -> None:
    """Time forwards of few and many rows, short and long ones, with short and long drafts. Each is
    run once before it counts."""
    capacity, length = engine.num_slots, engine.max_length
    for count, size, window in itertools.product(
        sorted({1, max(1, capacity // 4), capacity}),
        sorted({min(8, length - 1), min(512, length // 2)}),
        (0, 3, 15),
    ):
        if (
            count * (window + 1) > engine.max_batch_tokens
            or size + window + num_forwards + 2 > length
        ):
            continue
        engine.reset()
        drafts = _FixedDrafts(window)
        engine.add(
            [Row(SampleId(0, 0, sample), (1,) * size, length - size) for sample in range(count)]
        )
        while engine.queue or (engine.lengths <= size).any():
            engine.step(params, drafts)
        for _ in range(num_forwards):
            started = clock.perf_counter()
            _, load = engine.step(params, drafts)
            if load is not None:
                cost.anchor(*load[:4], clock.perf_counter() - started)
    engine.reset()
