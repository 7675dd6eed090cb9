"""Reward models in idle time: ranks that wait score their finished responses (RollPacker).

A response is queued for each model once it is finished. A rank that waits for others scores its
own queue in slices (`ScoreResponses`). What is left after the rollout, mostly of the slowest ranks,
is gathered and divided among all ranks by tokens (`ModelPool.finish`), so each second of scoring
that idle time takes spares the step a share of it. Placement of rows needs to know nothing of it:
whoever generates a response, all ranks share what scoring is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from bubblespec import loading
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.arrays import unpacked
from bubblespec.engine.model import of_layers
from bubblespec.errors import InputError, log, one_line
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.reward_models.model import RewardModel
from bubblespec.mechanisms.reward_models.model import load as load_model
from bubblespec.memory import Needs, num_bytes
from bubblespec.planner.batches import MicrobatchCost
from bubblespec.records import RolloutRecord, Span, StepRecord
from bubblespec.rewards.functions import Answer, OwnPool, RewardFailure, Sample, checked
from bubblespec.rollout.plan import SLICE_S, IdleTask, Mechanism, RolloutPlan
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Prompt

NAME = "reward_models"
SPAN = "score"


class Piece(NamedTuple):
    """A sequence to score."""

    tokens: np.ndarray
    """int64."""
    give: Callable[[Answer], None]


class ModelPool(OwnPool):
    """One reward model, and what this rank has to score with it."""

    def __init__(self, model: RewardModel, clock: Any):
        self.model, self.clock, self.cost = model, clock, MicrobatchCost()
        self.queue: list[Piece] = []
        self.after_s = 0.0
        """Seconds of this rank's scoring after the rollout."""
        self.make_room: Callable[[], None] = lambda: None
        """Releases the memory that scoring needs, where keys and values may hold it."""
        self._has_warned = False

    def submit(self, samples: list[Sample]) -> Future:
        future: Future[list[Answer]] = Future()
        answers: list[Answer | None] = [None] * len(samples)
        for index, sample in enumerate(samples):
            give = partial(_give, future, answers, index)
            try:
                self.queue.append(
                    Piece(self.model.tokens_of(sample.prompt, sample.completion), give)
                )
            except Exception as error:  # the chat template is someone else's code
                failure = RewardFailure("exception", f"its tokenizer raised {one_line(error)}")
                give(Answer(failure, 0.0, self.clock.monotonic()))
        return future

    def run(self) -> None:
        self.score(self.take())

    def take(self, max_tokens: float = np.inf) -> list[Piece]:
        """Take the longest piece from the queue, and the longest others with which it fits."""
        chosen = self.next(max_tokens)
        taken = set(map(id, chosen))
        self.queue = [piece for piece in self.queue if id(piece) not in taken]
        return chosen

    def next(self, max_tokens: float) -> list[Piece]:
        """Return the longest piece of the queue, and the longest others that fit with it."""
        chosen: list[Piece] = []
        for piece in sorted(self.queue, key=lambda piece: -len(piece.tokens)):
            if not chosen or len(piece.tokens) <= max_tokens:
                chosen.append(piece)
                max_tokens -= len(piece.tokens)
        return chosen

    def next_slice(self) -> list[Piece]:
        """Return the pieces of the next slice of idle work."""
        return self.next(min(self.cost.max_tokens(SLICE_S), self.model.max_tokens))

    def score(self, pieces: Sequence[Piece]) -> Span:
        """Score these pieces, and give their answers. Return the span of time."""
        logits, span = self.timed([piece.tokens for piece in pieces])
        sizes = [len(piece.tokens) for piece in pieces]
        each_s = (span.end_s - span.begin_s) / max(sum(sizes), 1)
        ended_s = self.clock.monotonic()
        for piece, size, logit in zip(pieces, sizes, logits, strict=True):
            piece.give(Answer(checked(logit), each_s * size, ended_s))
        return span

    def timed(self, sequences: Sequence[np.ndarray]) -> tuple[list[float], Span]:
        """Return the logits of sequences, and the span of time, from which costs are learned."""
        begin_s = self.clock.perf_counter()
        logits = self.model.logits(sequences)
        span, sizes = Span(SPAN, begin_s, self.clock.perf_counter()), list(map(len, sequences))
        if sizes:
            num_batches = len(list(self.model.batches(sizes)))
            self.cost.observe(num_batches, sum(sizes), span.end_s - span.begin_s)
        return logits, span

    def finish(self, ranks: Ranks) -> None:
        pieces, self.queue = self.queue, []
        own = [len(piece.tokens) for piece in pieces]
        counts = ranks.gather_ragged(np.array([self.model.num_truncated, *own], np.int64))
        self._warn(int(sum(of_rank[0] for of_rank in counts)), ranks)
        sizes = np.concatenate([of_rank[1:] for of_rank in counts])
        if not len(sizes):
            return
        tokens = np.concatenate([np.zeros(0, np.int64), *(piece.tokens for piece in pieces)])
        sequences = unpacked(np.concatenate(ranks.gather_ragged(tokens)), sizes)
        rank_of = divide(sizes, ranks.world_size)
        mine = np.flatnonzero(rank_of == ranks.rank)
        if len(mine):
            self.make_room()
        logits, span = self.timed([sequences[index] for index in mine.tolist()])
        self.after_s += span.end_s - span.begin_s
        found = np.array([*logits, span.end_s - span.begin_s], np.float64)
        of_ranks = ranks.gather_ragged(found)
        scores, seconds = np.zeros((2, len(sizes)))
        for rank, values in enumerate(of_ranks):
            is_own = rank_of == rank
            scores[is_own] = values[:-1]
            seconds[is_own] = values[-1] * sizes[is_own] / max(sizes[is_own].sum(), 1)
        first = sum(len(of_rank) - 1 for of_rank in counts[: ranks.rank])
        ended_s = self.clock.monotonic()
        for index, piece in enumerate(pieces, first):
            answer = Answer(checked(float(scores[index])), float(seconds[index]), ended_s)
            piece.give(answer)

    def _warn(self, num_truncated: int, ranks: Ranks) -> None:
        """Warn once per run of sequences that are longer than the model's positions."""
        if num_truncated and not self._has_warned and ranks.is_main:
            what = f"{num_truncated} texts are longer than its {self.model.max_length} positions"
            log(f"warning: reward {self.model.path}: {what}; it scores their last ones")
        self._has_warned |= num_truncated > 0


def _give(future: Future, answers: list[Answer | None], index: int, answer: Answer) -> None:
    """Note one answer; the last one completes the future, unless its rollout was abandoned."""
    answers[index] = answer
    if None not in answers and future.set_running_or_notify_cancel():
        future.set_result(answers)


def divide(sizes: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the rank of each sequence, int64 [S]: longest first, to the rank with fewest tokens.

    sizes: tokens of each, int64 [S]."""
    total, rank_of = np.zeros(num_ranks, np.int64), np.zeros(len(sizes), np.int64)
    for index in np.argsort(-sizes, kind="stable").tolist():
        rank_of[index] = rank = int(total.argmin())
        total[rank] += sizes[index]
    return rank_of


class ScoreResponses(IdleTask):
    """Scoring in one rollout on one rank."""

    name = SPAN

    def __init__(self, pools: list[ModelPool], num_ranks: int, frees_cache: bool):
        """frees_cache: whether there is no memory for a slice while keys and values are held."""
        self.pools, self.num_ranks, self.frees_cache = pools, num_ranks, frees_cache

    def can_begin(self) -> bool:
        """Whether own rows are done or wait for environments, and there is a response to score."""
        engine = self.view.engine
        if self.view.unfinished and not engine.is_waiting:
            return False
        return (engine.is_idle or not self.frees_cache) and self._next_pool() is not None

    def next_slice(self) -> tuple[float, float]:
        pool, size = self._next()
        return pool.cost.seconds(size), pool.cost.tokens_s(size) / self.num_ranks

    def do_slice(self) -> Span:
        pool, size = self._next()
        self.view.record.idle[self.name].saved_s += pool.cost.tokens_s(size)
        pool.make_room()
        return pool.score(pool.take(min(pool.cost.max_tokens(SLICE_S), pool.model.max_tokens)))

    def finish(self, ranks: Ranks) -> None:
        """Share the saved seconds evenly: all ranks score what is left after the rollout."""
        use = self.view.record.idle[self.name]
        use.saved_s = float(ranks.all_gather(np.array([use.saved_s])).mean())

    def _next_pool(self) -> ModelPool | None:
        return next((pool for pool in self.pools if pool.queue and pool.cost.is_known), None)

    def _next(self) -> tuple[ModelPool, int]:
        """Return the model of the next slice, and the slice's tokens."""
        pool = self._next_pool()
        assert pool is not None
        return pool, sum(len(piece.tokens) for piece in pool.next_slice())


class RewardModelsMechanism(Mechanism):
    """Scoring by reward models in idle time, in rollouts of steps and evaluations."""

    name = NAME

    def __init__(self, sampler: Sampler, pools: list[ModelPool]):
        self.sampler, self.pools, self.after_s = sampler, pools, 0.0
        self.frees_cache = sampler.config.rollout.free_cache_engine
        for pool in pools if self.frees_cache else ():
            pool.make_room = sampler.engine.release

    def begin_rollout(self, plan: RolloutPlan) -> None:
        for pool in self.pools:
            pool.queue.clear()  # of a rollout that was abandoned
            pool.after_s = 0.0
        is_on = self.sampler.config.reward.model_in_idle_time
        if is_on and plan.scoring is not None and self.sampler.board is not None:
            num_ranks = self.sampler.ranks.world_size
            plan.works.append(ScoreResponses(self.pools, num_ranks, self.frees_cache))

    def end_rollout(self, record: RolloutRecord) -> None:
        self.after_s += sum(pool.after_s for pool in self.pools)

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        after_s, self.after_s = self.after_s, 0.0
        return {"reward/model_s": after_s}


def load(run: Run) -> None:
    """Load the run's reward models; in virtual time, take what stands in. Raises InputError."""
    config, ranks = run.config, run.ranks
    if run.virtual is not None:
        for path in config.reward_models:
            run.rewards[path] = run.virtual[NAME]
        return
    device = torch.device("cpu") if config.reward.model_device == "cpu" else ranks.device
    for path in config.reward_models:
        model = load_model(config, path, device, run.now_s)
        run.rewards[path] = ModelPool(model, ranks.clock)
        run.frozen.append(model.model)
        if model.batching != "packed" and ranks.is_main:
            how = "padded" if model.batching == "padded" else "fed one by one"
            log(f"reward {path}: its sequences are {how}, as they cannot be packed")


def pools_of(run: Run) -> list[ModelPool]:
    return [pool for pool in run.rewards.values() if isinstance(pool, ModelPool)]


def check(run: Run, prompts: Sequence[Prompt]) -> None:
    """Raise InputError if a model has no chat template for prompts that are chats."""
    for pool in pools_of(run):
        model, has_chats = pool.model, any(not isinstance(p.text, str) for p in prompts)
        if has_chats and model.tokenizer.chat_template is None:
            key = loading.key_of(run.config, model.path)
            problem = "has no chat template, but prompts of the data are chats"
            raise InputError(f"{key}: the tokenizer of {model.path} {problem}")


def add_needs(needs: Needs, run: Run) -> Needs:
    """Add the memory of reward models that share a GPU with the policy."""
    config = run.config
    if not config.reward_models or config.reward.model_device == "cpu":
        return needs
    weights, scoring = 0, needs.scoring
    dtype = config.model.dtype if config.reward.model_dtype == "auto" else config.reward.model_dtype
    for path in config.reward_models:
        if path in run.rewards:  # loaded: what is free now is next to it
            shape = run.rewards[path].model.model.config  # type: ignore[attr-defined]
        else:
            shape = loading.from_pretrained(AutoConfig, config, path, num_labels=1)
            with torch.device("meta"):
                auto_class = AutoModelForSequenceClassification
                weights += num_bytes(auto_class.from_config(shape, dtype=getattr(torch, dtype)))
        hidden = shape.get_text_config().hidden_size
        inner = max(of_layers(shape, "intermediate_size", 4 * hidden))
        layer = (11 * hidden + 4 * inner) * getattr(torch, dtype).itemsize
        scoring = max(scoring, config.reward.model_max_tokens_per_batch * layer)
    others = needs.others | ({"reward models": weights} if weights else {})
    return replace(needs, others=others, scoring=scoring)


def make(run: Run) -> RewardModelsMechanism | None:
    """Create the mechanism, if rewards are models."""
    pools = pools_of(run)
    return RewardModelsMechanism(run.sampler, pools) if pools else None
