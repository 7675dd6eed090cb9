"""Training of the drafter on the policy's hidden states, to predict what the policy says next.

The policy's distribution over the drafter's tokens, at the sampling temperature, is the teacher,
and soft cross-entropy the loss. The drafter is unrolled over a few passes, in which it continues
from its own estimates as it does in a chain. It has an optimizer of its own; nothing here touches
the policy's gradient.

Before the first step (`make_drafter`) the policy answers the prompts of the coming steps, and all
ranks train together on that, with averaged gradients. Later the policy's own training gives hidden
states of recent responses (`take`), each rank learns from them in idle time (`run_slice`), and
after each rollout all ranks continue with the mean of their drafters (`merge`).

Shape legend: S sequences, T their padded positions, H hidden size, V the drafter's tokens, L tokens
of a sequence.
"""

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad, scaled_dot_product_attention
from tqdm import tqdm
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.data.schedule import StepSchedule
from bubblespec.dist.ranks import Ranks
from bubblespec.draft.drafter import Drafter, DrafterRunner
from bubblespec.draft.drafter_source import DrafterSource
from bubblespec.engine.engine import Engine
from bubblespec.engine.linear import Plan, use_plans
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.packing import pack_sequences, to_device
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError, log
from bubblespec.learn.microbatch import Microbatch
from bubblespec.planner.costs import CostModel
from bubblespec.types import Row, SampleId

PASSES = 3  # of the unrolled drafter; later tokens of a chain are rarely right
MAX_GRAD_NORM = 0.5
BETAS = (0.9, 0.95)
SEQUENCES_PER_UPDATE = 8
VOCAB_SIZE = 16_384  # token ids that it can draft
BUFFER_TOKENS = 50_000  # of recent responses, with hidden states, that each rank keeps
PIECE = 256  # response tokens of an example: a slice does not grow with the response
CONTEXT = 16  # tokens before them; more, as chains have, taught nothing more
EPOCHS = 8  # of the warm start
MERGE_EVERY = 10  # updates of a rank in the warm start
LEARNING_RATE = 1e-3  # of AdamW at the start of the warm start
FINAL_RATE = 0.1  # of the learning rate, at the end of the warm start and after it
MAX_STEPS = 256  # whose prompts a warm start answers
SHARE_PER_STEP = 0.25  # of the buffer that one step may replace
AVERAGE = 0.2  # weight of the latest slice in the seconds per token
WEIGHTS_FILE, DRAFTER_FILE = "drafter.safetensors", "drafter.json"


class Example(NamedTuple):
    """A response to learn from, or a piece of it."""

    id: SampleId
    context_length: int
    """Tokens in `tokens` before the piece: of the prompt, or of the response."""
    tokens: np.ndarray
    """int64 [L + 1], with the context."""
    hidden: torch.Tensor
    """[L, H], the policy's hidden states at all of them but the last; on the host."""
    first: int = 0
    """Where in the response the piece begins, in tokens."""


def examples_of(
    name: SampleId, tokens: np.ndarray, prompt_length: int, hidden: torch.Tensor
) -> Iterator[Example]:
    """The pieces of one response. tokens: int64 [L + 1], prompt and response; hidden: [L, H]."""
    for first in range(0, len(tokens) - prompt_length, PIECE):
        begin = prompt_length + first
        start, stop = max(begin - CONTEXT, 0), min(begin + PIECE, len(tokens))
        # A copy of its own: a view would keep the states of the whole batch.
        states = hidden[start : stop - 1].detach().cpu().clone()
        yield Example(name, begin - start, tokens[start:stop], states, first)


class UnrolledPacking:
    """S sequences, each padded to T positions, one after the other. Each forward with it is the
    next pass.

    Pass j computes token j of the chains that began j - 1 positions earlier: a query at position i
    sees the keys of pass 1 up to i - (j - 1), and then one key of each later pass up to its own
    (training-time test of EAGLE-3, arXiv 2503.01840).
    """

    def __init__(self, num_sequences: int, length: int, device: torch.device):
        self.shape = (num_sequences, length)
        self.position = torch.arange(length, device=device).repeat(num_sequences)
        self._keys: list[torch.Tensor] = []  # [S, heads, T, D] of each pass, and their values
        self._values: list[torch.Tensor] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float
    ) -> torch.Tensor:
        """query: [N, heads, D]; key, value: [N, key/value heads, D], N = S * T. Returns [N, heads,
        D]."""
        fold = query.shape[1] // key.shape[1]
        query, key, value = (
            t.unflatten(0, self.shape).transpose(1, 2) for t in (query, key, value)
        )
        self._keys.append(key.repeat_interleave(fold, dim=1))
        self._values.append(value.repeat_interleave(fold, dim=1))
        keys, values = torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)
        mask = self._mask(query.device)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, device: torch.device) -> torch.Tensor:
        """bool [T, passes * T]: which keys each query of the latest pass sees. Queries at the start
        of a sequence, whose chain would have begun before it, see their own key only."""
        position, passes = torch.arange(self.shape[1], device=device), len(self._keys)
        distance = position[:, None] - position
        later = [distance == passes - number for number in range(2, passes + 1)]
        return torch.cat([distance >= passes - 1, *later], dim=1)


class _Padded(NamedTuple):
    """S examples as tensors on the device. Position i has the state of token i and the token after
    it; it predicts token i + 2."""

    hidden: torch.Tensor
    """[S, T, H]."""
    following: torch.Tensor
    """int64 [S, T], token i + 1."""
    teacher: torch.Tensor
    """[S, T, H], the policy's state at token i + 1."""
    target: torch.Tensor
    """int64 [S, T], token i + 2."""
    counts: torch.Tensor
    """bool [S, T], token i + 2 is of the response."""


class DrafterTraining:
    """The drafter of a run on one rank: its optimizer, and the latest examples.

    token_s: seconds of a slice per token, 0 before the first.
    """

    def __init__(
        self,
        source: DrafterSource,
        params: SamplingParams,
        *,
        learning_rate: float,
        max_tokens: int,
        seed: int,
        clock=time,
    ):
        """params: of the rows; max_tokens: of all examples that are kept."""
        self.source, self.drafter = source, source.runner.drafter
        self.max_tokens, self.seed, self.clock = max_tokens, seed, clock
        self.kernel, self.temperature = source.runner.engine.runner.kernel, params.temperature
        self.examples: deque[Example] = deque()
        self._room = 0.0  # tokens of examples that the current step may still add
        self.random = np.random.default_rng(seed)
        self.params = list(self.drafter.parameters())
        # In bfloat16 most of a small update would be rounded away.
        has_masters = self.params[0].dtype == torch.bfloat16
        self.masters = [p.detach().float() for p in self.params] if has_masters else self.params
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=learning_rate, betas=BETAS, weight_decay=0.0
        )
        self.num_updates, self.token_s = 0, 0.0
        self._num_added = 0  # sequences in the gradient since the last update
        self._num_unmerged = 0  # updates since all ranks had the same drafter

    # The buffer

    def add(self, example: Example) -> None:
        """Keep it, if something can be learned from it, and drop the oldest ones beyond
        `max_tokens`."""
        if 2 <= len(example.hidden) <= self.max_tokens:
            self.examples.append(example)
            size = sum(len(kept.hidden) for kept in self.examples)
            while size > self.max_tokens:
                size -= len(self.examples.popleft().hidden)

    @torch.no_grad()
    def take(self, batch: Microbatch, hidden: torch.Tensor) -> None:
        """Examples from a micro-batch of the policy's training; see `Learner.on_hidden`."""
        if not self.source.is_enabled:
            return
        last = (batch.target[batch.lengths.cumsum(0) - 1]).cpu().numpy()
        fed = batch.input_ids.split(batch.sequence_lengths)
        states = hidden.split(batch.sequence_lengths)
        for number, name in enumerate(batch.ids):
            if self._room <= 0:
                return
            tokens = np.append(fed[number].cpu().numpy(), last[number])
            prompt_length = len(tokens) - int(batch.lengths[number])
            for example in examples_of(name, tokens, prompt_length, states[number]):
                self._room -= len(example.hidden)
                self.add(example)

    # The loss

    def loss(self, examples: Sequence[Example]) -> torch.Tensor:
        """Mean soft cross-entropy of a predicted token, over passes and positions: a scalar with a
        gradient."""
        batch = self._pad(examples)
        with torch.no_grad():
            teacher = self.drafter.logits(batch.teacher[batch.counts]).float() / self.temperature
            teacher = teacher.softmax(-1)
        losses = [
            -(teacher[started] * (logits.float() / self.temperature).log_softmax(-1)).sum(-1)
            for logits, started in self._passes(batch)
        ]
        return torch.cat(losses).mean()

    def backward(self, examples: Sequence[Example], share: float = 1.0) -> float:
        """Add `share` of the gradient of the loss; returns the loss."""
        for param in self.params:
            param.requires_grad_(True)
        loss = self.loss(examples)
        (share * loss).backward()
        return float(loss.detach())

    @torch.no_grad()
    def step(self) -> None:
        """One update with the gradient that has been added up."""
        if self.masters is not self.params:
            for master, param in zip(self.masters, self.params, strict=True):
                # The layer's own embedding is not used.
                master.grad = None if param.grad is None else param.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self.optimizer.step()
        if self.masters is not self.params:
            torch._foreach_copy_(self.params, self.masters)
        for param in [*self.params, *self.masters]:
            param.grad = None
        self.num_updates += 1
        self._num_unmerged += 1

    def set_rate(self, learning_rate: float) -> None:
        """Of the updates from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def _passes(
        self, batch: _Padded, num_passes: int = PASSES
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Per pass, the drafter's logits [n, V] and which of the positions that count they are for,
        bool: chains begin where the first token that they draft is of the response."""
        sequences, length, size = batch.hidden.shape
        packing = UnrolledPacking(sequences, length, batch.hidden.device)
        hidden, started = batch.hidden, batch.counts
        for _ in range(num_passes):
            following = batch.following.reshape(-1)
            states = self.drafter(hidden.reshape(-1, size), following, packing, self.kernel)
            states = states.view(sequences, length, size)
            yield self.drafter.logits(states[started]), started[batch.counts]
            hidden = torch.cat((batch.hidden[:, :1], states[:, :-1]), dim=1)
            started = batch.counts & pad(started, (1, 0))[:, :-1]

    def _pad(self, examples: Sequence[Example]) -> _Padded:
        length = max(len(example.hidden) for example in examples) - 1
        shape, device = (len(examples), length), self.params[0].device
        hidden = examples[0].hidden.new_zeros(*shape, examples[0].hidden.shape[1])
        teacher = torch.zeros_like(hidden)
        tokens, counts = np.zeros((2, *shape), np.int64), np.zeros(shape, bool)
        for row, example in enumerate(examples):
            size = len(example.hidden) - 1
            hidden[row, :size], teacher[row, :size] = example.hidden[:-1], example.hidden[1:]
            tokens[:, row, :size] = example.tokens[1:-1], example.tokens[2:]
            counts[row, max(example.context_length - 2, 0) : size] = True
        following, target = to_device(tokens, device)
        counts = to_device(counts, device)
        return _Padded(hidden.to(device), following, teacher.to(device), target, counts)

    # Idle time

    def slice_tokens(self) -> int:
        """Tokens of the shortest slice; 0 where there is nothing to learn."""
        return min((len(example.hidden) for example in self.examples), default=0)

    def run_slice(self, limit_s: float) -> float:
        """Learn from one example that is expected to take no longer than `limit_s`, if there is
        one. Returns the seconds that it took."""
        begin_s = self.clock.perf_counter()
        if self.token_s:
            count = min(SEQUENCES_PER_UPDATE, len(self.examples))
            drawn = self.random.choice(len(self.examples), count, replace=False) if count else ()
            candidates = [self.examples[number] for number in drawn]
        else:  # how long a slice takes is not known yet
            candidates = sorted(self.examples, key=lambda example: len(example.hidden))
        fits = (x for x in candidates if len(x.hidden) * self.token_s <= limit_s)
        example = next(fits, None)
        if example is None:
            return 0.0
        self.backward([example], 1 / SEQUENCES_PER_UPDATE)
        self._num_added += 1
        if self._num_added == SEQUENCES_PER_UPDATE:
            self.step()
            self._num_added = 0
        seconds = self.clock.perf_counter() - begin_s
        weight = AVERAGE if self.token_s else 1.0
        self.token_s += weight * (seconds / len(example.hidden) - self.token_s)
        return seconds

    @torch.no_grad()
    def merge(self, ranks: Ranks) -> int:
        """All ranks together, after a rollout: continue with the mean of their drafters, weighted
        by the updates since the last time. Returns how many all have made. New examples of the step
        are welcome from now on."""
        self._room = SHARE_PER_STEP * self.max_tokens
        made = ranks.gather(np.array([self._num_unmerged])).ravel()
        own, total = self._num_unmerged, int(made.sum())
        self._num_unmerged = 0
        if ranks.world_size > 1 and total:
            flat = torch.cat([p.reshape(-1) for p in self.masters]) * (own / total)
            parts = ranks.sum_(flat).split([p.numel() for p in self.masters])
            for master, param, part in zip(self.masters, self.params, parts, strict=True):
                master.copy_(part.view_as(master))
                param.copy_(master)
        return total

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Of a step. The chain length is the mean over forwards in which there was a choice."""
        rates = ranks.gather(self.source.acceptance_rates()).mean(axis=0)
        metrics = {f"drafter/accepted_{n + 1}": float(rate) for n, rate in enumerate(rates)}
        metrics["drafter/mean_acceptance_length"] = 1.0 + float(rates.sum())
        metrics["drafter/num_updates"] = self.num_updates
        chosen = ranks.gather(self.source.chain_lengths).sum(axis=0)
        self.source.chain_lengths[:] = 0
        if chosen.any():
            mean_length = chosen @ np.arange(len(chosen)) / chosen.sum()
            metrics["drafter/chain_length"] = float(mean_length)
        return metrics


# Before the first step


def make_drafter(
    config: Config,
    ranks: Ranks,
    engine: Engine,
    params: SamplingParams,
    schedule: StepSchedule,
    cost: CostModel,
    *,
    step: int,
    plans: dict[str, Plan],
    checkpoint: str | None,
) -> tuple[DrafterTraining, list[Row]]:
    """All ranks together, before `step`: the drafter of a run, and the responses that were
    generated to train it, which are drafts of their steps. It is the checkpoint's, else the one of
    drafter.path, else it is trained now.

    cost: of the policy's forwards; plans: of linear layers. Raises StopRequested, and InputError
    for a folder without such a drafter or a policy that can have none.
    """
    model, rows, num_updates = engine.runner.model, [], 0
    saved = read_drafter(config, model, checkpoint)
    if saved is not None:
        drafter, num_updates = saved
    else:
        ranks.place = "warm start of the drafter"
        began_s = ranks.clock.perf_counter()
        rows = generate(config, ranks, engine, params, schedule, step)
        ids = frequent_ids(rows, params.stop_token_ids, VOCAB_SIZE, ranks)
        try:
            drafter = Drafter(model, ids, config.run.seed)
        except ValueError as error:
            raise InputError(f"speculative.method: no drafter for this policy: {error}") from error
    use_plans(drafter, plans)
    source = DrafterSource(DrafterRunner(drafter, engine, params), cost, ranks.clock)
    training = DrafterTraining(
        source,
        params,
        learning_rate=FINAL_RATE * LEARNING_RATE,
        max_tokens=BUFFER_TOKENS,
        seed=config.run.seed,
        clock=ranks.clock,
    )
    training.num_updates = num_updates
    if saved is None:
        examples = learn_from(model, rows, training.kernel)
        train(training, examples, LEARNING_RATE, ranks)
        for example in examples:
            training.add(example)
        seconds = ranks.clock.perf_counter() - began_s
        if ranks.is_main:
            log(f"drafter: trained with {training.num_updates} updates in {seconds:.0f} s")
    source.enable(True)
    source.profile()
    return training, rows


def generate(
    config: Config,
    ranks: Ranks,
    engine: Engine,
    params: SamplingParams,
    schedule: StepSchedule,
    step: int,
) -> list[Row]:
    """This rank's responses to the prompts of coming steps, nearest first, until it has its share
    of drafter.warm_start tokens; the last of them are not finished. Raises StopRequested."""
    depth = min(MAX_STEPS, config.run.max_steps - step - 1)
    rollout = config.rollout
    rows: list[Row] = []
    for groups in [schedule.launch(step).groups, *schedule.upcoming(step, depth)]:
        samples = list(itertools.product(groups, range(rollout.num_generations)))
        rows += [
            Row(group.sample(sample), group.prompt.token_ids, rollout.max_completion_length)
            for group, sample in samples[ranks.rank :: ranks.world_size]
        ]
    wanted, num_tokens = -(-config.drafter.warm_start // ranks.world_size), 0
    engine.reset()
    engine.add(rows)
    with tqdm(total=wanted, desc="drafter: responses", disable=not ranks.is_main) as bar:
        while num_tokens < wanted and not engine.is_idle and not ranks.must_stop:
            _, load = engine.step(params)
            gained = load.tokens - load.prompt_tokens
            num_tokens += gained
            bar.update(gained)
    engine.collect()
    engine.release()
    ranks.barrier_or_stop()
    return [row for row in rows if len(row.tokens)]


def frequent_ids(
    rows: Sequence[Row], stop_token_ids: Sequence[int], count: int, ranks: Ranks
) -> np.ndarray:
    """The `count` most frequent tokens of all ranks' responses, stop tokens among them, int64
    ascending."""
    tokens = np.concatenate([np.array(stop_token_ids, np.int64), *(row.tokens for row in rows)])
    ids, counts = np.unique(np.concatenate(ranks.gather_ragged(tokens)), return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:count]])


@torch.no_grad()
def learn_from(model: PreTrainedModel, rows: Sequence[Row], kernel: str) -> list[Example]:
    """Examples of these responses, with the policy's hidden states."""
    examples = []
    for row in rows:
        tokens = np.concatenate((row.prompt, row.tokens))
        packing = pack_sequences([len(tokens) - 1], model.device)
        hidden = forward_hidden(model, to_device(tokens[:-1], model.device), packing, kernel)
        found = examples_of(row.id, tokens, len(row.prompt), hidden)
        examples += [example for example in found if len(example.hidden) > 1]
    return examples


def train(
    training: DrafterTraining, examples: list[Example], learning_rate: float, ranks: Ranks
) -> None:
    """EPOCHS of updates on the examples of all ranks, merged now and then, at a rate that falls to
    FINAL_RATE. Raises StopRequested."""
    count = int(ranks.gather(np.array([len(examples)])).max())
    per_epoch = -(-count // SEQUENCES_PER_UPDATE)
    begins = np.arange(0, len(examples), SEQUENCES_PER_UPDATE)
    with tqdm(total=EPOCHS * per_epoch, desc="drafter: training", disable=not ranks.is_main) as bar:
        for number in range(EPOCHS * per_epoch):
            if number % per_epoch == 0:  # another order, of similar lengths, to pad little
                shuffled = [examples[n] for n in training.random.permutation(len(examples))]
                shuffled.sort(key=lambda example: len(example.hidden))
                batches = training.random.permutation(begins).tolist()
            training.set_rate(learning_rate * (1 - (1 - FINAL_RATE) * number / bar.total))
            if batches:  # other ranks may have more
                begin = batches.pop()
                training.backward(shuffled[begin : begin + SEQUENCES_PER_UPDATE])
                training.step()
            if number % MERGE_EVERY == 0 or number + 1 == bar.total:
                training.merge(ranks)
                ranks.barrier_or_stop()
            bar.update()
    training.set_rate(FINAL_RATE * learning_rate)


# On disk


def _describe(model: PreTrainedModel) -> dict:
    """What a drafter's policy must agree in."""
    vocab_size, hidden_size = model.get_output_embeddings().weight.shape
    return {
        "policy": type(model).__name__,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
    }


def save_drafter(folder: str, training: DrafterTraining) -> None:
    """Weights and tokens, as two files of a folder. Raises OSError."""
    state = training.drafter.state_dict()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, os.path.join(folder, WEIGHTS_FILE))
    about = _describe(training.drafter.policy) | {
        "ids": training.drafter.ids.tolist(),
        "num_updates": training.num_updates,
    }
    with open(os.path.join(folder, DRAFTER_FILE), "w", encoding="utf-8") as file:
        json.dump(about, file)


def read_drafter(
    config: Config, model: PreTrainedModel, checkpoint: str | None
) -> tuple[Drafter, int] | None:
    """The checkpoint's drafter, else that of drafter.path, else None; see `load_drafter`."""
    folder, key = config.drafter.path, "drafter.path"
    if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, DRAFTER_FILE)):
        folder, key = checkpoint, "run.resume_from_checkpoint"
    return load_drafter(folder, model, config.run.seed, key) if folder else None


def load_drafter(
    folder: str, model: PreTrainedModel, seed: int, key: str = "drafter.path"
) -> tuple[Drafter, int]:
    """A saved drafter for this policy, and its number of updates. key: of the configuration, which
    named the folder. Raises InputError where there is none, or another policy's."""
    try:
        with open(os.path.join(folder, DRAFTER_FILE), encoding="utf-8") as file:
            about = json.load(file)
        for name, wanted in _describe(model).items():
            if about[name] != wanted:
                raise ValueError(f"its policy's {name} is {about[name]}, this one's is {wanted}")
        ids, num_updates = np.array(about["ids"], np.int64), int(about["num_updates"])
        if ids.ndim != 1 or not len(ids) or (np.diff(np.append(-1, ids)) <= 0).any():
            raise ValueError(f"{DRAFTER_FILE}: ids must be token ids, ascending")
        if ids[-1] >= about["vocab_size"] or num_updates < 0:
            raise ValueError(f"{DRAFTER_FILE}: ids or num_updates are out of range")
        drafter = Drafter(model, ids, seed)
        drafter.load_state_dict(load_file(os.path.join(folder, WEIGHTS_FILE)))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{key}: no drafter of this policy can be read from {folder}: {reason}"
        ) from error
    return drafter, num_updates
