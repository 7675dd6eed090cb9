"""Training of the drafter on the policy's hidden states, to predict the policy's next tokens.

The policy's distribution over the drafter's tokens, at the sampling temperature, is the teacher,
and soft cross-entropy the loss. The drafter is unrolled over a few passes, in which it continues
from its own estimates as it does in a chain. It has an optimizer of its own; nothing here touches
the policy's gradient.

At its warm start the policy answers prompts of coming steps, and each rank learns from its hidden
states there; later from those of the policy's training (`take`), in idle time (`run_slice`). Now
and then, and after each rollout, all ranks continue with the mean of their drafters (`merge`).

Shape legend: S sequences, T their padded positions, N = S * T, H hidden size, W = (1 + taps) * H, D
size of a head, V the drafter's tokens, L tokens of a sequence.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.arrays import to_device
from bubblespec.engine.model import forward_hidden, pack_sequences, with_taps
from bubblespec.engine.ops.softmax import AttentionOptions, attend_heads
from bubblespec.errors import log
from bubblespec.learn.microbatch import Microbatch
from bubblespec.mechanisms.drafter.layer import Drafter
from bubblespec.records import Span
from bubblespec.rollout.plan import SLICE_S, IdleTask, RankView
from bubblespec.rollout.sampler import Sampler
from bubblespec.types import Row

PASSES = 3  # of the unrolled drafter; places of a chain beyond them are rarely right
MAX_GRAD_NORM = 0.5
BETAS = (0.9, 0.95)
EXAMPLES_PER_UPDATE = 2  # few: what a short warm start lacks is updates, not data
BUFFER_TOKENS = 50_000  # of recent responses, with hidden states, that each rank keeps
SHARE_PER_STEP = 0.25  # of the buffer that one step may replace
PIECE = 256  # response tokens of an example: a slice does not grow with the response
CONTEXT = 16  # tokens before them; more context, as chains have, did not help
LEARNING_RATE = 1.5e-3  # of AdamW at the start of the warm start
FINAL_RATE = 0.1  # of the learning rate, at the end of the warm start and after it
AVERAGE = 0.2  # weight of the latest slice in the seconds per token
# The saving of a slice in later rollouts is unknown, so work with a known saving comes first.
LITTLE_S = 1e-9
MAX_SHARE = 0.05  # share of the rollout so far that a slice may take, as other ranks may wait
# Of the warm start: token ids that a new drafter can draft, and steps whose prompts are answered.
VOCAB_SIZE, MAX_STEPS = 16_384, 256
EPOCHS, MERGE_EVERY = 8, 40  # a rank's updates from one mean of all drafters to the next


class Example(NamedTuple):
    """A response to learn from, or a piece of one."""

    context_length: int
    """Tokens in `tokens` before the piece, from the prompt or the response."""
    tokens: np.ndarray
    """int64 [L], tokens with the context, without the last token of the response."""
    hidden: torch.Tensor
    """[L, W], the policy's hidden states at these tokens, see `Taps.behind`, on the host."""


def examples_of(tokens: np.ndarray, prompt_length: int, hidden: torch.Tensor) -> Iterator[Example]:
    """Yield the pieces of one response.

    Observations are learned from too: the policy is as good a teacher for them. tokens: int64 [L],
    prompt and response without its last token; hidden: [L, W]."""
    for begin in range(prompt_length, len(tokens) + 1, PIECE):
        start, stop = max(begin - CONTEXT, 0), min(begin + PIECE - 1, len(tokens))
        if stop - start > 1:  # a state, and the next one to predict
            # A copy of its own: a view would keep the states of the whole batch.
            states = hidden[start:stop].detach().cpu().clone()
            yield Example(begin - start, tokens[start:stop], states)


class UnrolledPacking:
    """S sequences, each padded to T positions, one after the other. Each forward is the next pass.

    Pass j computes token j of the chains that began j - 1 positions earlier: a query at position i
    sees the keys of pass 1 up to i - (j - 1), and then one key of each later pass up to its own
    (training-time test of EAGLE-3, arXiv 2503.01840).
    """

    def __init__(self, num_sequences: int, length: int, device: torch.device):
        self.shape = (num_sequences, length)
        self.position = torch.arange(length, device=device).repeat(num_sequences)
        self._keys: list[torch.Tensor] = []  # [S, heads, T, D] of each pass, and their values
        self._values: list[torch.Tensor] = []

    def attend(self, layer: int, query, key, value, options: AttentionOptions) -> torch.Tensor:
        """Return [N, heads, D] of query [N, heads, D] and key and value [N, key/value heads, D]."""
        queries_per_kv = query.shape[1] // key.shape[1]
        query, key, value = (
            t.unflatten(0, self.shape).transpose(1, 2) for t in (query, key, value)
        )
        self._keys.append(key.repeat_interleave(queries_per_kv, dim=1))
        self._values.append(value.repeat_interleave(queries_per_kv, dim=1))
        keys, values = torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)
        # Queries whose chain would have begun before the sequence see their own key only.
        position, passes = torch.arange(self.shape[1], device=query.device), len(self._keys)
        distance = position[:, None] - position
        later = [distance == passes - number for number in range(2, passes + 1)]
        mask = torch.cat([distance >= passes - 1, *later], dim=1)
        out = attend_heads(query, keys, values, mask, options)
        return out.transpose(1, 2).flatten(0, 1)


class DrafterTraining:
    """Training of a run's drafter on one rank: its optimizer, and the latest examples."""

    is_enabled = True
    """Whether the drafter drafts, and so learns."""

    def __init__(
        self, drafter: Drafter, temperature: float, seed: int, kernel: str = "sdpa", clock=time
    ):
        """temperature: of sampling; kernel: of attention in training."""
        self.drafter, self.temperature, self.clock = drafter, temperature, clock
        self.kernel = kernel
        self.random = np.random.default_rng(seed)
        self.examples: deque[Example] = deque()
        self._room = 0.0  # tokens that the current step may still add
        self.params: list[torch.Tensor] = list(self.drafter.parameters())
        # In bfloat16 most of a small update would be rounded away.
        dtype = torch.promote_types(self.params[0].dtype, torch.float32)
        self.masters = [p.detach().to(dtype, copy=True) for p in self.params]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=FINAL_RATE * LEARNING_RATE, betas=BETAS, weight_decay=0.0
        )
        self.num_updates = 0
        self.token_s = 0.0  # seconds of a slice per token, 0 before the first
        self._num_added = 0  # examples in the gradient
        self._num_unmerged = 0  # updates since all ranks had the same drafter
        self.has_failed = False
        """Whether the drafter, the same on all ranks, is no use any more."""

    # The buffer

    def add(self, example: Example) -> None:
        """Keep an example, and drop the oldest ones beyond BUFFER_TOKENS."""
        self.examples.append(example)
        size = sum(len(kept.hidden) for kept in self.examples)
        while size > BUFFER_TOKENS:
            size -= len(self.examples.popleft().hidden)

    @torch.no_grad()
    def take(self, batch: Microbatch, hidden: torch.Tensor) -> None:
        """Keep examples of a micro-batch of the policy's training; see `Learner.on_hidden`."""
        if not self.is_enabled:
            return
        hidden = with_taps(self.drafter.policy, hidden)
        fed = batch.input_ids.split(batch.sequence_lengths)
        states = hidden.split(batch.sequence_lengths)
        for number, prompt_length in enumerate(batch.prompt_lengths):
            if self._room <= 0:
                return
            tokens = fed[number].cpu().numpy()
            for example in examples_of(tokens, prompt_length, states[number]):
                self._room -= len(example.hidden)
                self.add(example)

    # Learning

    def learn(self, examples: Sequence[Example]) -> None:
        """Add the gradient of examples, and update after EXAMPLES_PER_UPDATE of them."""
        (len(examples) / EXAMPLES_PER_UPDATE * self.loss(examples)).backward()
        self._num_added += len(examples)
        if self._num_added >= EXAMPLES_PER_UPDATE:
            self._update()

    def loss(self, examples: Sequence[Example]) -> torch.Tensor:
        """Return the mean soft cross-entropy of a token over passes and positions, a scalar."""
        hidden, tokens, counts = self._pad(examples)
        temperature = self.temperature
        with torch.no_grad():
            teacher = self.drafter.policy_logits(hidden[:, 1:][counts]).float() / temperature
            teacher = teacher.softmax(-1)
        losses = [
            -(teacher[started] * (logits.float() / temperature).log_softmax(-1)).sum(-1)
            for logits, started in self._passes(hidden[:, :-1], tokens, counts, PASSES)
        ]
        return torch.cat(losses).mean()

    def _passes(
        self, hidden: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, num_passes: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return per pass the logits [n, V] and which of the counted positions they are for, bool.

        Chains begin where the first token that they draft is of the response. hidden: [S, T, W];
        tokens, counts: of `_pad`."""
        packing = UnrolledPacking(len(tokens), tokens.shape[1], hidden.device)
        given, started = self.drafter.combine(hidden), counts
        known = given
        for _ in range(num_passes):
            fed = known.flatten(0, 1), tokens.flatten()
            states = self.drafter(*fed, packing, self.kernel).view_as(given)
            yield self.drafter.logits(states[started]), started[counts]
            known = torch.cat((given[:, :1], states[:, :-1]), dim=1)
            started = counts & pad(started, (1, 0))[:, :-1]

    def _pad(self, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return padded examples: hidden [S, T + 1, W], next tokens int64 [S, T], counts [S, T].

        A position counts if the token that it predicts, the second after it, is of the response."""
        parts = (
            [x.hidden for x in examples],
            [torch.from_numpy(x.tokens[1:]) for x in examples],
            [torch.arange(len(x.hidden) - 1) >= x.context_length - 2 for x in examples],
        )
        device = self.params[0].device
        hidden, tokens, counts = (pad_sequence(part, batch_first=True).to(device) for part in parts)
        return hidden, tokens, counts

    @torch.no_grad()
    def _update(self) -> None:
        """Update with the gradient of all examples since the last update."""
        for master, param in zip(self.masters, self.params, strict=True):
            # The layer's own embedding is not used.
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
            param.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.masters)
        self._num_added = 0
        self.num_updates += 1
        self._num_unmerged += 1

    # Idle time

    def slice_tokens(self) -> int:
        """Return the tokens of the shortest slice; 0 where there is nothing to learn."""
        return min((len(example.hidden) for example in self.examples), default=0)

    def run_slice(self, limit_s: float) -> float:
        """Learn from one example that is expected to fit `limit_s`; return the seconds it took."""
        begin_s = self.clock.perf_counter()
        fitting = [x for x in self.examples if len(x.hidden) * self.token_s <= limit_s]
        if not fitting:
            return 0.0
        example = fitting[self.random.integers(len(fitting))]
        self.learn([example])
        seconds = self.clock.perf_counter() - begin_s
        weight = AVERAGE if self.token_s else 1.0
        self.token_s += weight * (seconds / len(example.hidden) - self.token_s)
        return seconds

    @torch.no_grad()
    def merge(self, ranks: Ranks) -> None:
        """Continue, on all ranks, with the mean of their drafters by updates since the last time.

        From now on the step's examples are accepted."""
        self._room = SHARE_PER_STEP * BUFFER_TOKENS
        made, self._num_unmerged = self._num_unmerged, 0
        flat = parameters_to_vector(self.masters)
        if ranks.world_size > 1:
            total = ranks.all_reduce_(torch.cat((made * flat, flat.new_tensor([made]))))
            if total[-1]:
                flat = total[:-1] / total[-1]
                vector_to_parameters(flat, self.masters)
                torch._foreach_copy_(self.params, self.masters)
        if not self.has_failed and not flat.isfinite().all():
            self.has_failed = True
            self.drafter.discard()
            if ranks.is_main:
                log("the learned drafter drafts no more: its weights are not numbers")


class TrainDrafter(IdleTask):
    """Training in the idle time of one rollout on one rank, slice by slice (TLT)."""

    name = "train_drafter"

    def __init__(self, training: DrafterTraining):
        self.training, self.clock = training, training.clock

    def begin(self, view: RankView) -> None:
        """Start with a rollout; what later steps save by the training is unknown."""
        super().begin(view)
        view.record.idle[self.name].saved_s = math.nan

    def next_slice(self) -> tuple[float, float]:
        return self._slice_s(), LITTLE_S * self._slice_s()

    def can_begin(self) -> bool:
        """Whether this rank is idle, and others would not wait for long."""
        return self.view.engine.is_waiting and 0 < self._slice_s() <= self._limit_s()

    def do_slice(self) -> Span:
        begin_s = self.clock.perf_counter()
        return Span("train drafter", begin_s, begin_s + self.training.run_slice(self._limit_s()))

    def finish(self, ranks: Ranks) -> None:
        """Continue with the mean of all ranks' drafters."""
        self.training.merge(ranks)

    def _slice_s(self) -> float:
        """Return predicted seconds of the shortest slice; a little where none has been timed."""
        tokens = self.training.slice_tokens()
        return tokens * self.training.token_s or LITTLE_S * bool(tokens)

    def _limit_s(self) -> float:
        elapsed_s = self.clock.perf_counter() - self.view.record.began_s
        return min(max(SLICE_S, self._slice_s()), MAX_SHARE * elapsed_s)


def answer_prompts(sampler: Sampler, step: int) -> list[Row]:
    """Return this rank's share of drafter.warm_start tokens of responses to coming prompts.

    The nearest steps come first; the last responses are unfinished. Raises StopRequested."""
    config, ranks, engine = sampler.config, sampler.ranks, sampler.engine
    schedule, rollout, rows = sampler.schedule, config.rollout, []
    depth = min(MAX_STEPS, config.run.max_steps - step - 1)
    for groups in [schedule.launch(step).groups, *schedule.upcoming(step, depth)]:
        samples = list(itertools.product(groups, range(rollout.num_generations)))
        rows += [
            Row(group.sample(sample), group.prompt.token_ids, rollout.max_completion_length)
            for group, sample in samples[ranks.rank :: ranks.world_size]
        ]
    wanted, num_tokens = -(-config.drafter.warm_start // ranks.world_size), 0
    engine.reset()
    engine.add(rows)
    with _progress("tokens of responses to learn from", wanted, ranks) as bar:
        while num_tokens < wanted and not engine.is_idle and not ranks.must_stop:
            load = engine.step(sampler.params)[1]
            assert load is not None
            num_tokens += load.tokens - load.prompt_tokens
            bar.update(load.tokens - load.prompt_tokens)
    engine.collect()
    engine.release()
    ranks.barrier_or_stop()
    return [row for row in rows if len(row.tokens)]


def frequent_ids(rows: Sequence[Row], stop_token_ids: Sequence[int], ranks: Ranks) -> np.ndarray:
    """Return the VOCAB_SIZE most frequent tokens of all ranks, with stop tokens, ascending."""
    tokens = np.concatenate([np.array(stop_token_ids, np.int64), *(row.tokens for row in rows)])
    ids, counts = np.unique(np.concatenate(ranks.gather_ragged(tokens)), return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:VOCAB_SIZE]])


@torch.no_grad()
def examples_from(model: PreTrainedModel, rows: Sequence[Row], kernel: str) -> list[Example]:
    """Compute the policy's hidden states of these responses, and return examples with them."""
    examples: list[Example] = []
    for row in rows:
        tokens = np.concatenate((row.prompt, row.tokens[:-1]))
        packing = pack_sequences([len(tokens)], model.device)
        hidden = forward_hidden(model, to_device(tokens, model.device), packing, kernel)
        examples += examples_of(tokens, len(row.prompt), with_taps(model, hidden))
    return examples


def warm_up(training: DrafterTraining, examples: list[Example], ranks: Ranks) -> None:
    """Train for EPOCHS at a rate that falls to FINAL_RATE, and keep the latest examples.

    Raises StopRequested."""
    by_length = sorted(examples, key=lambda example: len(example.hidden))  # to pad little
    begins = np.arange(0, len(examples), EXAMPLES_PER_UPDATE)
    order = np.concatenate([training.random.permutation(begins) for _ in range(EPOCHS)])
    total = int(ranks.all_gather(np.array([len(order)])).max())
    with _progress("updates of the drafter", total, ranks) as bar:
        for number in range(total):
            rate = LEARNING_RATE * (1 - (1 - FINAL_RATE) * number / total)
            training.optimizer.param_groups[0]["lr"] = rate
            if number < len(order):
                training.learn(by_length[order[number] : order[number] + EXAMPLES_PER_UPDATE])
            if number % MERGE_EVERY == 0 or number + 1 == total:
                training.merge(ranks)
                ranks.barrier_or_stop()
            bar.update()
    training.optimizer.param_groups[0]["lr"] = FINAL_RATE * LEARNING_RATE
    for example in examples:
        training.add(example)


def _progress(description: str, total: int, ranks: Ranks) -> tqdm:
    """Return a progress bar, which rank 0 shows on a terminal alone."""
    is_hidden = None if ranks.is_main else True
    return tqdm(desc=description, total=total, disable=is_hidden, leave=False)
