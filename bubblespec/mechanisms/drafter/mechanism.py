"""The learned drafter of a run (TLT, arXiv 2511.16665), and how it drafts chains of tokens.

`DrafterRunner` keeps the hidden states of each slot's latest positions, which the policy's forwards
compute anyway. Before a chain the drafter catches up: all positions that the policy has verified
since the last chain go through it in one forward, over its own small cache of keys and values. From
there it continues token by token; what this leaves in the cache is overwritten by the next
catching up. What is kept follows a row that moves to another slot, and rows share what is kept of a
common prompt; a row whose states are no longer kept starts again from its last CONTEXT positions.
Tokens are drawn with the noise that the row itself will use.

Shape legend: N positions, H hidden size, R active rows, M rows that get a chain, n tokens of a
chain.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.config.mechanisms import AUTO
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.chains import DraftModelRunner, DraftModelSource, profile
from bubblespec.engine.arrays import ragged, to_device
from bubblespec.engine.batch import Batch, SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import attention_layers, layer_heads, tap
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import widen
from bubblespec.errors import InputError, log, one_line
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.drafter.eagle3 import (
    CONFIG_FILE,
    NUM_TAPS,
    Eagle3,
    read_eagle3,
    save_eagle3,
)
from bubblespec.mechanisms.drafter.heads import head_of, read_head, save_head
from bubblespec.mechanisms.drafter.layer import Drafter, last_full_layer
from bubblespec.mechanisms.drafter.training import (
    VOCAB_SIZE,
    DrafterTraining,
    TrainDrafter,
    answer_prompts,
    examples_from,
    frequent_ids,
    warm_up,
)
from bubblespec.memory import Needs, has_pages, max_slots
from bubblespec.planner.costs import CostModel
from bubblespec.records import Samples, StepRecord
from bubblespec.rollout.plan import Mechanism, RolloutPlan
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import HEADS, Row

NAME = DRAFTER_FOLDER = "drafter"  # the folder: of a checkpoint
PRIOR = 0.6  # acceptance rate of each position before measurements: enough to be tried
NUM_KEPT = 128  # latest positions of a slot whose hidden states are kept
CONTEXT = 64  # positions a row starts with; below NUM_KEPT by more than a verification feeds
MAX_CHAIN_LENGTH = 5  # tokens
# By which logits are multiplied before noise is added. The drafter's probabilities are means over
# what the policy may say at a place: unlikely tokens mostly have less, and would win too often.
SHARPNESS = 1.2
MAX_GRAPH_TOKENS = 512  # of a CUDA graph: a few for each row
BLOCK = 64  # a multiple of the positions that a GPU attends to at once
MAX_ROWS = 128  # with more active rows no hidden states are kept and nothing is drafted
# What `auto` needs of a drafter: with the acceptance rate of a good one at each position of a
# chain, one row alone has to be generated so many times as fast as without drafts.
GOOD_RATE, MIN_SPEEDUP = 0.85, 1.3


class DrafterForward(ModelForward):
    """The drafter's layer as a forward, whose second input is the policy's hidden states."""

    def hidden(  # type: ignore[override]  # it has a second input
        self, tokens: torch.Tensor, packing, hidden: torch.Tensor
    ) -> torch.Tensor:
        return self.model(hidden, tokens, packing)


class DrafterRunner(DraftModelRunner):
    """The drafter's part of an engine: a `SlotFollower` of its runner while it is enabled."""

    def __init__(self, drafter: Drafter, engine: Engine, params: SamplingParams):
        """Create a runner for the rows of an engine. params: of these rows."""
        runner = cast(ModelRunner, engine.runner)
        # Rows are in the first slots; in the others nothing is kept.
        self.num_slots = min(runner.num_slots, MAX_ROWS)
        length = runner.max_length + MAX_CHAIN_LENGTH
        length = -(-length // BLOCK) * BLOCK
        cache = KVCache(self.num_slots, length, int(runner.graphs is not None))
        forward = DrafterForward(drafter, memory=runner.forward.memory)
        size = drafter.hidden_size
        super().__init__(engine, params, forward, cache, MAX_GRAPH_TOKENS, size)
        self.drafter = drafter
        self._hidden: torch.Tensor | None = None  # [slots, NUM_KEPT, H], by position % NUM_KEPT
        # Per slot: hidden states have been kept without a gap for positions in [_first, _end); the
        # drafter's cache begins at position _base (-1: it is empty) and holds _num_cached.
        self._context = np.zeros((4, runner.num_slots), np.int64)
        self._first, self._end, self._base, self._num_cached = self._context
        # Slots of the latest draw, int64 [M], and the drafter's states there, [M, H].
        self._latest: tuple[np.ndarray, torch.Tensor] | None = None
        self.forget()

    def enable(self, is_on: bool) -> None:
        """Follow the engine's rows, before they are in slots; or stop and release the memory."""
        followers = self.runner.followers
        if self in followers:
            followers.remove(self)
            if not is_on:
                self.release()
        if is_on:
            followers.append(self)

    def forget(self, slots: int | slice | np.ndarray = slice(None)) -> None:
        """Forget slots whose rows have changed, or all after an update."""
        self._context[:, slots] = 0
        self._base[slots] = -1

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Move the row in slot `source` to slot `target`."""
        self.forget(target)
        if self._hidden is not None and max(source, target) < self.num_slots:
            self._context[:, target] = self._context[:, source]
            self._hidden[target] = self._hidden[source]
            self.cache.copy(source, target, int(self._num_cached[source]))

    @torch.inference_mode()
    def share(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """See `Runner`: what is still kept of the positions of slots `source` serves both."""
        self.forget(target)
        end = self._end[source]
        first = np.maximum(self._first[source], end - NUM_KEPT)
        is_kept = (np.maximum(source, target) < self.num_slots) & (first < length) & (length <= end)
        if self._hidden is None or not is_kept.any():
            return
        source, target = source[is_kept], target[is_kept]
        self._first[target], self._end[target] = first[is_kept], length[is_kept]
        source, target = to_device(np.array((source, target)), self._hidden.device)
        self._hidden[target] = self._hidden[source]

    def release(self) -> None:
        """Release all memory."""
        super().release()
        self.cache.clear()
        self._hidden = self._latest = None
        self.forget()

    def note(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Keep what chains begin with, of the states [N or more, W] of what a forward has fed.

        Those of rejected draft tokens are overwritten when their positions are fed again."""
        if len(batch.count) > MAX_ROWS:
            self.forget()
            return
        if self._hidden is None:
            size = self.drafter.hidden_size
            self._hidden = hidden.new_zeros(self.num_slots, NUM_KEPT, size)
        fed = np.flatnonzero(batch.count)
        start, end = batch.start[fed], batch.start[fed] + batch.count[fed]
        has_gap = start > self._end[fed]
        self._first[fed] = np.where(has_gap, start, self._first[fed])
        self._end[fed] = np.where(has_gap, end, np.maximum(self._end[fed], end))
        # Of a row that was rewound, the drafter's cache holds what was thrown away.
        valid = np.maximum(start - self._base[fed], 0)
        self._num_cached[fed] = np.minimum(self._num_cached[fed], valid)
        slot, position = batch.index
        latest = np.flatnonzero(position >= (batch.start + batch.count - NUM_KEPT)[slot])
        states = hidden[: len(slot)]
        if len(latest) < len(slot):
            states = hidden[to_device(latest, hidden.device)]
        index = to_device(np.array((slot[latest], position[latest] % NUM_KEPT)), hidden.device)
        self._hidden[index[0], index[1]] = self.drafter.combine(states)

    def can_draft(self, slots: np.ndarray) -> np.ndarray:
        """Whether the hidden states of slots, or -1, are kept without a gap: bool [M]."""
        if self._hidden is None or len(self.engine.rows) > MAX_ROWS:
            return np.zeros(len(slots), bool)
        known = slots >= 0
        known[known] = self._to_catch_up(slots[known]) > 0
        return known

    def candidates(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        state, fed = self._catch_up(slots) if number == 0 else self._go_on(slots, number, tokens)
        self._latest = slots, state
        return SHARPNESS * widen(self.drafter.logits(state)), self.drafter.device_ids, fed

    def _catch_up(self, slots: np.ndarray) -> tuple[torch.Tensor, int]:
        """Feed what the policy has verified since each row's last chain.

        Returns the states [M, H] at the rows' ends, and how many positions were fed."""
        assert self._hidden is not None
        count, cached = self._to_catch_up(slots), self._num_cached[slots]
        row, offset = ragged(count)
        position = (self._base[slots] + cached)[row] + offset
        index = to_device(np.array((slots[row], position % NUM_KEPT)), self.runner.device)
        tokens, hidden = self.engine.tokens[slots[row], position + 1], self._hidden[*index]
        states = self.feed(tokens, slots, cached, count, hidden)
        self._num_cached[slots] += count
        return states[to_device(np.cumsum(count) - 1, self.runner.device)], len(row)

    def _go_on(
        self, slots: np.ndarray, number: int, tokens: np.ndarray
    ) -> tuple[torch.Tensor, int]:
        """Feed chains' last tokens after the drafter's own states of the draw before."""
        assert self._latest is not None
        known, state = self._latest
        if len(slots) < len(known):
            state = state[to_device(known.searchsorted(slots), self.runner.device)]
        begin = self._num_cached[slots] + number - 1
        return self.feed(tokens, slots, begin, np.ones_like(slots), state), len(slots)

    def run_once(self, num_rows: int) -> None:
        """Draw a token for each of so many empty rows, to time it."""
        weight = self.forward.weight()
        self._latest = np.arange(num_rows), weight.new_ones(num_rows, self.drafter.hidden_size)
        super().run_once(num_rows)

    def _to_catch_up(self, slots: np.ndarray) -> np.ndarray:
        """Return how many positions each row's cache lacks; 0 where hidden states are missing.

        Rows whose cache cannot be continued start again."""
        verified = self.engine.cached[slots]
        kept_from = np.maximum(self._first[slots], self._end[slots] - NUM_KEPT)
        base, cached = self._base[slots], self._num_cached[slots]
        # Rows that go on after what was thrown away have too much in it.
        restarts = (base < 0) | (base + cached < kept_from) | (base + cached > verified)
        self._base[slots] = np.where(restarts, np.maximum(kept_from, verified - CONTEXT), base)
        self._num_cached[slots] = np.where(restarts, 0, cached)
        lacking = verified - self._base[slots] - self._num_cached[slots]
        return np.where(self._end[slots] >= verified, lacking, 0)


def make_source(runner: DraftModelRunner, cost: CostModel, clock) -> DraftModelSource:
    """Create the drafter's source, and time forwards of the drafter. cost: of the policy's."""
    own_cost, options = profile(runner, clock, MAX_ROWS), {"prior": PRIOR, "clock": clock}
    return DraftModelSource(NAME, runner, cost, own_cost, longest=MAX_CHAIN_LENGTH, **options)


class DrafterMechanism(Mechanism):
    """The drafter, its source of draft tokens and its training."""

    name = NAME

    def __init__(
        self,
        sampler: Sampler,
        model: PreTrainedModel,
        drafter: Drafter | None,
        set_kernels: Callable[[torch.nn.Module], None],
        kernel: str = "sdpa",
    ):
        """drafter: given, or None if it is to be made.

        set_kernels: chooses kernels of linear layers; kernel: of attention in training."""
        self.sampler, self.model, self.set_kernels = sampler, model, set_kernels
        self.kernel, self._given = kernel, drafter
        self.config, self.ranks, self.params = sampler.config, sampler.ranks, sampler.params
        self.training: DrafterTraining | None = None
        """None until `start`, and in a run that is complete already."""
        self.source: DraftModelSource
        self.runner: DrafterRunner
        self._moved: dict[int, DrafterRunner] = {}  # by id() of the engine
        self._counts: np.ndarray | None = None  # of each token of a vocabulary that is narrowed

    def start(self, trainer) -> None:
        """Take the drafter that is given, else make and train one. Raises StopRequested."""
        config, sampler, step = self.config, self.sampler, trainer.num_updates
        if step >= config.run.max_steps:
            return
        with trainer.reporter.phase("preparing the drafter"):
            rows: list[Row] = []
            if self._given is None:
                self.ranks.activity = "warm start of the drafter"
                rows = answer_prompts(sampler, step)
            training = self.training = self._make_training(rows)
            # The warm start generates the beginnings of episodes alone.
            if "bubble" in config.speculative.sources and not config.environment.is_used:
                sampler.keep_as_drafts(rows, step, are_deferred=False)
            if config.drafter.train:
                trainer.learner.on_hidden = training.take

    def _make_training(self, rows: list[Row]) -> DrafterTraining:
        """Create the training and its source. rows: to learn from where no drafter is given."""
        config, ranks, params, sampler = self.config, self.ranks, self.params, self.sampler
        assert sampler.proposer is not None
        drafter = self._given
        if drafter is None:
            ids = frequent_ids(rows, params.stop_token_ids, ranks)
            drafter = Eagle3(self.model, ids, config.run.seed)
        self.set_kernels(drafter)
        runner = self.runner = DrafterRunner(drafter, sampler.engine, params)
        training = DrafterTraining(
            drafter, params.temperature, config.run.seed, self.kernel, ranks.clock
        )
        if self._given is None:
            examples = examples_from(self.model, rows, training.kernel)
            warm_up(training, examples, ranks)
            if ranks.is_main:
                responses = f"(drafter.warm_start = {config.drafter.warm_start})"
                of = f"the policy's own responses {responses}"
                log(f"drafter: trained with {training.num_updates} updates on {of}")
        runner.enable(True)
        self.source = make_source(runner, sampler.proposer.cost, ranks.clock)
        sampler.proposer.add(self.source)
        return training

    def begin_rollout(self, plan: RolloutPlan) -> None:
        """Draft and learn in rollouts of steps, unless drafts are left out."""
        if self.training is None:
            return
        is_used = NAME not in plan.without and plan.step is not None
        is_used &= not self.training.has_failed
        self.training.is_enabled = is_used and self.config.drafter.train
        self.source.is_enabled = is_used and self.source.problem is None
        self.runner.enable(self.source.is_enabled)
        # On all ranks or on none: a problem of the source may be known to one alone.
        if self.training.is_enabled:
            plan.works.append(TrainDrafter(self.training))

    @contextlib.contextmanager
    def moved_to(self, engine: Engine) -> Iterator[None]:
        """Context in which the source drafts for the rows of another engine."""
        if self.training is None:  # the run is complete: nothing is drafted
            yield
            return
        if (runner := self._moved.get(id(engine))) is None:
            runner = DrafterRunner(self.training.drafter, engine, self.params)
            self._moved[id(engine)] = runner
        runner.enable(self.source.is_enabled)
        with self.source.moved_to(runner):
            yield

    def metrics(self, ranks: Ranks, record: StepRecord) -> dict[str, float]:
        """Return how far chains hold, how long they are, and what they take."""
        assert self.training is not None
        self._narrow(record.samples)
        rates = self.source.rates.accepted
        metrics = {f"drafter/accepted_{n + 1}": float(rate) for n, rate in enumerate(rates)}
        metrics["drafter/mean_acceptance_length"] = 1.0 + float(rates.sum())
        metrics["drafter/num_updates"] = self.training.num_updates
        return metrics | self.source.metrics(ranks)

    def _narrow(self, samples: Samples) -> None:
        """Let a model's own head draft the tokens alone that responses have had most often so far.

        Otherwise the policy's whole output head, often larger than the layer by far, is read for
        each token of a chain (FR-Spec, arXiv 2502.14856)."""
        assert self.training is not None
        drafter = self.training.drafter
        if self._counts is None:
            if isinstance(drafter, Eagle3) or len(drafter.ids) <= VOCAB_SIZE:
                return
            self._counts = np.zeros(len(drafter.ids), np.int64)
            self._counts[list(self.params.stop_token_ids)] = np.iinfo(np.int64).max // 2
        tokens = np.concatenate(samples.tokens)
        self._counts += np.bincount(tokens, minlength=len(self._counts))
        frequent = np.argsort(-self._counts, kind="stable")[:VOCAB_SIZE]
        drafter.draft_among(np.sort(frequent))

    def save(self, folder: str) -> None:
        """Write what is not in the model's files into a checkpoint. Raises OSError."""
        if self.training is None or self.training.has_failed:
            return
        drafter, own = self.training.drafter, os.path.join(folder, DRAFTER_FOLDER)
        if isinstance(drafter, Eagle3):
            save_eagle3(own, drafter)
        elif self.config.model.lora_r:
            save_head(own, self.model)


def is_wanted(config: Config, model: Any) -> bool:
    """Whether a run drafts with a drafter: auto takes one that is given or came with the model."""
    has_one = config.drafter.path is not None or bool(vars(model).get(HEADS))
    is_auto = config.speculative.method == AUTO
    return NAME in config.speculative.sources or (is_auto and has_one)


def prepare(run: Run) -> None:
    """Find the drafter that is given, before the engine's first forward. Raises InputError.

    It is that of the checkpoint, else of drafter.path, else the head that came with the model;
    without any one is to be made."""
    config, model = run.config, run.model
    if not is_wanted(config, model):
        return
    path, key = config.drafter.path, "drafter.path"
    own = os.path.join(run.checkpoint or "", DRAFTER_FOLDER)
    if run.checkpoint and os.path.isfile(os.path.join(own, CONFIG_FILE)):
        path, key = own, "run.resume_from_checkpoint"
    drafter: Drafter | None = None
    if path is not None:
        try:
            drafter = read_eagle3(path, model)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            problem = f"no drafter of this policy can be read from {path}: {one_line(error)}"
            raise InputError(f"{key}: {problem}") from error
    else:
        if run.checkpoint and config.model.lora_r:
            read_head(own, model)
        try:
            drafter = head_of(model)
        except ValueError as error:
            if run.ranks.is_main:
                log(f"warning: the model's head cannot draft: {error}")
    run.own[NAME] = drafter
    if drafter is None and NAME not in config.speculative.sources:
        return
    try:  # one that is to be made: whether there can be one
        taps = (drafter or Eagle3(model, np.arange(1))).taps
        if taps:
            tap(model, taps)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"no drafter for this policy: {one_line(error)}"
        raise InputError(f"speculative.method: {problem}") from error


def add_needs(needs: Needs, run: Run) -> Needs:
    """Add the memory of the drafter, a layer and the projection into it, if the run has one."""
    config, model = run.config, run.model
    if not is_wanted(config, model):
        return needs
    shape = model.config.get_text_config(decoder=True)
    size, layers, width = model.dtype.itemsize, shape.num_hidden_layers, shape.hidden_size
    total = sum(p.numel() for p in model.parameters())
    embedding: Any = model.get_input_embeddings()
    parameters = (total - embedding.weight.numel()) / layers + 2 * width**2
    kept = VOCAB_SIZE * width * size  # rows of the output head, see `policy_logits`
    if config.drafter.path is not None or not vars(model).get(HEADS):  # EAGLE-3
        parameters += (NUM_TAPS + 2) * width**2 + VOCAB_SIZE * width
        kept += NUM_TAPS * width * config.rollout.max_num_batched_tokens * size
    # weights, gradients, moments and, for bfloat16, float32 masters
    drafter = parameters * (2 * size + 16 if model.dtype == torch.bfloat16 else 4 * size) + kept
    slot, numbers = needs.slot, [n * (key + value) for _, n, key, value in layer_heads(shape)]
    copied = attention_layers(shape).index(last_full_layer(shape))
    own = slot * numbers[copied] // sum(numbers)
    if has_pages(config):  # the drafter's own keys and values are in slots
        drafter += min(max_slots(config, run.ranks.world_size), MAX_ROWS) * own
    else:
        slot += own
    shared_row = needs.shared_row * slot // needs.slot
    others = needs.others | {"drafter": int(drafter)}
    return replace(needs, others=others, slot=slot, shared_row=shared_row)


def is_too_slow(drafter: Drafter, run: Run) -> bool:
    """Whether chains of a drafter cannot pay on some rank, in a run that takes one by itself."""
    config, ranks, engine = run.config, run.ranks, run.sampler.engine
    if config.speculative.method != AUTO or config.speculative.planning == "always":
        return False
    run.set_kernels(drafter)
    runner = DrafterRunner(drafter, engine, run.sampler.params)
    own_s = profile(runner, ranks.clock, 1).seconds(1, 1)
    runner.release()
    speedup = possible_speedup(run.sampler.stats.cost, own_s)
    slowest = float(ranks.all_gather(np.array([speedup])).min())
    if slowest < MIN_SPEEDUP and ranks.is_main:
        gain = f"a good one would make this policy {slowest:.2f} times as fast"
        log(f"no drafter drafts: {gain}, too little to pay")
    return slowest < MIN_SPEEDUP


def possible_speedup(cost: CostModel, own_s: float) -> float:
    """Return how many times as fast one row is generated with the best length of chains.

    cost: of the policy's forwards; own_s: seconds of one of the drafter's."""
    lengths = np.arange(1, MAX_CHAIN_LENGTH + 1)
    gained = 1.0 + np.cumsum(GOOD_RATE**lengths)
    seconds = lengths * own_s + cost.seconds(1, 1 + lengths, 1)
    return float((gained / seconds).max() * cost.seconds(1, 1))


def make(run: Run) -> DrafterMechanism | None:
    """Create the mechanism, if the run has a drafter; in virtual time, its source alone."""
    sampler = run.sampler
    if sampler.proposer is None:
        return None
    if run.virtual is not None:
        if (runner_of := run.virtual.get(NAME)) is None:  # by engine
            return None
        source = make_source(runner_of(sampler.engine), sampler.proposer.cost, run.ranks.clock)
        sampler.proposer.add(source)
        run.followers.append(lambda engine: source.moved_to(runner_of(engine)))
        return None
    drafter = run.own.get(NAME)
    if drafter is None and NAME not in run.config.speculative.sources:
        return None
    if drafter is not None and is_too_slow(drafter, run):
        drafter.discard()
        return None
    kernel = run.learner.kernel
    mechanism = DrafterMechanism(sampler, run.model, drafter, run.set_kernels, kernel)
    sampler.stats.chooser.add(NAME)
    run.followers.append(mechanism.moved_to)
    return mechanism
