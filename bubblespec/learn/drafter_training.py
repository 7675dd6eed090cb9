"""Training of the drafter: on hidden states of the policy that are there anyway, to say what the
policy says next.

The policy's distribution over the drafter's tokens, at the sampling temperature, is the teacher,
and soft cross-entropy the loss. The drafter is unrolled over a few passes, in which it goes on from
its own estimates as it does in a chain (`UnrolledPacking`). It has an optimizer of its own; nothing
here touches the policy's gradient.

Shape legend: S sequences, T their padded positions, H hidden size, V the drafter's tokens, L tokens
of a sequence.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bubblespec.engine.chains import Chains
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.noise import stream_keys
from bubblespec.engine.packing import to_device
from bubblespec.engine.unrolled import UnrolledPacking
from bubblespec.learn.microbatch import Microbatch
from bubblespec.types import SampleId

PASSES = 3  # of the unrolled drafter; later tokens of a chain are right too seldom to learn from
MAX_GRAD_NORM = 0.5
BETAS = (0.9, 0.95)
SEQUENCES_PER_UPDATE = 8
BANDS = 8  # lengths of about so many powers of two are kept alike
PIECE = (
    256  # response tokens of a lesson: what an update takes does not grow with the longest response
)
# tokens before them; chains see more (engine.chains), but nothing was learnt from 64 that 16 do not
# teach
CONTEXT = 16


class Lesson(NamedTuple):
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


class Lessons:
    """The latest responses to learn from, up to a number of tokens. Short ones, of which there are
    most, do not crowd out long ones: what has to go is the oldest of those lengths that have the
    most tokens, but one of each length stays if it can."""

    def __init__(self, max_tokens: int):
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._bands: list[list[Lesson]] = [[] for _ in range(BANDS)]

    def __len__(self) -> int:
        return sum(map(len, self._bands))

    def __iter__(self) -> Iterator[Lesson]:
        for band in self._bands:
            yield from band

    def add(self, lesson: Lesson) -> None:
        """Keep it, if there is something to learn from it, and it is no longer than all that may be
        kept."""
        size = len(lesson.hidden)
        if not 2 <= size <= self.max_tokens:
            return
        self._bands[min((size // 16).bit_length(), BANDS - 1)].append(lesson)
        self.num_tokens += size
        self.shrink(self.max_tokens)

    def shrink(self, max_tokens: int) -> None:
        """Keep no more than this, now and later."""
        self.max_tokens = max_tokens
        while self.num_tokens > self.max_tokens:
            fullest = max(
                self._bands,
                key=lambda band: (len(band) > 1, sum(len(lesson.hidden) for lesson in band)),
            )
            self.num_tokens -= len(fullest.pop(0).hidden)

    def draw(self, count: int, random: np.random.Generator) -> list[Lesson]:
        """Up to `count` different lessons, those of rare lengths more often."""
        bands = [band for band in self._bands if band]
        chance = (
            np.concatenate([np.full(len(band), 1 / len(band) ** 0.5) for band in bands])
            if bands
            else np.empty(0)
        )
        lessons = list(self)
        chosen = (
            random.choice(
                len(lessons), min(count, len(lessons)), replace=False, p=chance / chance.sum()
            )
            if lessons
            else []
        )
        return [lessons[number] for number in chosen]


def lessons_of(
    batch: Microbatch, hidden: torch.Tensor, max_tokens: int | None = None
) -> list[Lesson]:
    """The sequences of a micro-batch whose forward gave `hidden`, [N, H], up to so many tokens. The
    host waits for the device."""
    fed, targets, lengths = (
        t.cpu().numpy() for t in (batch.input_ids, batch.target, batch.lengths)
    )
    lessons, end, last, taken = [], 0, 0, 0
    for name, length, size in zip(batch.ids, lengths.tolist(), batch.sequence_lengths, strict=True):
        begin, end, last = end, end + size, last + length
        whole, prompt_length = np.append(fed[begin:end], targets[last - 1]), size - length + 1
        for first in range(0, length, PIECE):
            start, stop = (
                max(prompt_length + first - CONTEXT, 0),
                min(prompt_length + first + PIECE, size + 1),
            )
            taken += stop - 1 - start
            if max_tokens is not None and taken > max_tokens:
                return lessons
            # A copy of its own: a view would keep the states of the whole micro-batch.
            states = hidden[begin + start : begin + stop - 1].detach().cpu().clone()
            lessons.append(
                Lesson(name, prompt_length + first - start, whole[start:stop], states, first)
            )
    return lessons


class _Padded(NamedTuple):
    """S lessons as tensors on the device. Position i has the state of token i and the token after
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
    """The drafter's optimizer, and what it learns from."""

    def __init__(
        self,
        drafter: Drafter,
        kernel: str,
        *,
        learning_rate: float,
        temperature: float,
        max_tokens: int,
        seed: int,
    ):
        """max_tokens: of `Lessons`."""
        self.drafter, self.kernel, self.temperature, self.seed = drafter, kernel, temperature, seed
        self.lessons, self.random = Lessons(max_tokens), np.random.default_rng(seed)
        self.params = list(drafter.parameters())
        # In bfloat16 most of a small update would be rounded away.
        has_masters = self.params[0].dtype == torch.bfloat16
        self.masters = [p.detach().float() for p in self.params] if has_masters else self.params
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=learning_rate, betas=BETAS, weight_decay=0.0
        )
        self.num_updates = 0

    def loss(self, lessons: Sequence[Lesson]) -> torch.Tensor:
        """Mean soft cross-entropy of a predicted token, over passes and positions: a scalar with a
        gradient."""
        batch = self._pad(lessons)
        with torch.no_grad():
            teacher = (
                self.drafter.logits(batch.teacher[batch.counts]).float() / self.temperature
            ).softmax(-1)
        losses = [
            -(teacher[started] * (logits.float() / self.temperature).log_softmax(-1)).sum(-1)
            for logits, started in self._passes(batch)
        ]
        return torch.cat(losses).mean()

    def backward(self, lessons: Sequence[Lesson], share: float = 1.0) -> float:
        """Add `share` of the gradient of the loss; returns the loss."""
        for param in self.params:
            param.requires_grad_(True)
        loss = self.loss(lessons)
        (share * loss).backward()
        return float(loss.detach())

    @torch.no_grad()
    def step(self) -> None:
        """One update by the gradient that has been added up."""
        if self.masters is not self.params:
            for master, param in zip(self.masters, self.params, strict=True):
                master.grad = (
                    None if param.grad is None else param.grad.float()
                )  # the layer's own embedding is not used
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self.optimizer.step()
        if self.masters is not self.params:
            torch._foreach_copy_(self.params, self.masters)
        for param in {*self.params, *self.masters}:
            param.grad = None
        self.num_updates += 1

    @torch.no_grad()
    def accepted(
        self, lessons: Sequence[Lesson], chains: Chains, num_tokens: int = PASSES
    ) -> np.ndarray:
        """Chance that a chain's first n tokens are all right, float64 [num_tokens] for n = 1, 2,
        ..., from every position of these responses, drawn with their own noise."""
        batch = self._pad(lessons)
        keys, position = self._noise(lessons, batch)
        right = torch.zeros(num_tokens, dtype=torch.float64)
        count, before = torch.zeros_like(right), None
        for number, (logits, started) in enumerate(self._passes(batch, num_tokens)):
            is_right = torch.zeros_like(batch.counts)
            place = batch.counts.clone()
            place[batch.counts] = started
            drawn = chains.draw(logits, keys[place], position[place])
            is_right[place] = drawn == batch.target[place]
            # The chain whose token this is has got here only if its tokens before were right.
            before = (
                is_right
                if before is None
                else is_right & torch.nn.functional.pad(before, (1, 0))[:, :-1]
            )
            right[number], count[number] = before.sum(), place.sum()
        return (right / count.clamp(min=1)).numpy()

    def _passes(
        self, batch: _Padded, num_passes: int = PASSES
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each pass the drafter's logits [n, V] and which of the positions that count they are
        for, bool: chains begin where the first token that they draft is of the response."""
        sequences, length, size = batch.hidden.shape
        packing = UnrolledPacking(sequences, length, batch.hidden.device)
        hidden, started = batch.hidden, batch.counts
        for _ in range(num_passes):
            states = self.drafter(
                hidden.reshape(-1, size), batch.following.reshape(-1), packing, self.kernel
            )
            states = states.view(sequences, length, size)
            yield self.drafter.logits(states[started]), started[batch.counts]
            hidden = torch.cat((batch.hidden[:, :1], states[:, :-1]), dim=1)
            started = batch.counts & torch.nn.functional.pad(started, (1, 0))[:, :-1]

    def _pad(self, lessons: Sequence[Lesson]) -> _Padded:
        length = max(len(lesson.hidden) for lesson in lessons) - 1
        shape, device = (len(lessons), length), self.params[0].device
        hidden, teacher = (
            lessons[0].hidden.new_zeros(*shape, lessons[0].hidden.shape[1]) for _ in range(2)
        )
        tokens, counts = np.zeros((2, *shape), np.int64), np.zeros(shape, bool)
        for row, lesson in enumerate(lessons):
            size = len(lesson.hidden) - 1
            hidden[row, :size], teacher[row, :size] = lesson.hidden[:-1], lesson.hidden[1:]
            tokens[0, row, :size], tokens[1, row, :size] = lesson.tokens[1:-1], lesson.tokens[2:]
            counts[row, max(lesson.context_length - 2, 0) : size] = True
        following, target = to_device(tokens, device)
        return _Padded(
            hidden.to(device), following, teacher.to(device), target, to_device(counts, device)
        )

    def _noise(
        self, lessons: Sequence[Lesson], batch: _Padded
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise keys of the predicted tokens, int32 [S, T, 4], and their places in their responses,
        int64 [S, T]."""
        sequences, length = batch.target.shape
        place = np.array([[lesson.first - lesson.context_length] for lesson in lessons])
        position = np.maximum(np.arange(length) + 2 + place, 0)
        uid, visit, sample = np.repeat(
            np.array([lesson.id for lesson in lessons], np.int64), length, axis=0
        ).T
        keys = stream_keys(self.seed, uid, visit, sample, position.ravel()).reshape(
            sequences, length, 4
        )
        return to_device(keys, batch.target.device), to_device(position, batch.target.device)
