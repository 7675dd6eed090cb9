"""What a `ModelRunner` computes with: a model's forward over the cache, its logits and its tokens.

`ModelForward` is the model on this rank alone. Mechanisms have others over the same weights, and
several may share one cache.

Shape legend: N packed tokens, T positions sampled, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.batch import Batch, SamplingParams
from bubblespec.engine.decoder import Decoder, is_written_out, stacked
from bubblespec.engine.kv_cache import CachePacking
from bubblespec.engine.model import (
    forward_hidden,
    last_hidden,
    layer_heads,
    output_head,
    state_layers,
    with_taps,
)
from bubblespec.engine.ops import ROWS, SAMPLE, STATES, has_kernels, ops_for
from bubblespec.engine.sampling import Noise, sample

Sampled = tuple[torch.Tensor, torch.Tensor]  # see `sampling.sample`


class SlotFollower:
    """Keeps something of its own for the rows in a runner's slots, see `Runner`."""

    reads_states = True  # whether `note` does anything

    def move(self, source: int, target: int) -> None:
        """Continue the row of slot `source` in slot `target`."""

    def share(self, source: np.ndarray, target: np.ndarray, length: np.ndarray) -> None:
        """Let slots `target` begin with the first `length` positions of slots `source`."""

    def forget(self, slots: int) -> None:
        """Drop what is kept for a slot, which gets another row."""

    def note(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Take in what a forward has fed, and its hidden states [N or more, hidden]."""

    def release(self) -> None:
        """Give all memory back."""


class ModelForward:
    """The forward of a model on this rank alone; the last three methods serve CUDA graphs."""

    min_tokens = 1  # of the smallest graph
    rank = 0
    is_invariant = False  # whether logits of a row must not depend on other rows
    samples_alone = True  # whether sampling exchanges nothing with other ranks

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        enforce_eager: bool = False,
        memory: WeakSet | None = None,
    ):
        """memory: of other forwards, whose graphs share it."""
        self.model = model
        weight = self.weight()
        self.type = weight.device, weight.dtype
        self.ops = ops_for(*self.type)
        self.decoder = self.make_decoder()
        self.memory: WeakSet = WeakSet() if memory is None else memory
        """CUDA graphs with one memory: results are valid until the next replay of any."""
        # The shapes of torch's attention and windows depend on lengths.
        needed = (ROWS, STATES) if state_layers(model) else (ROWS,)
        has_all = all(has_kernels(*self.type, operation) for operation in needed)
        self.is_eager = enforce_eager or not has_all
        self.reduce = self.ops.best_and_sum
        self.queries_per_kv = fold_of(model)

    def make_decoder(self) -> Decoder | None:
        """Return the layers of a model that is written out."""
        model = cast(PreTrainedModel, self.model)
        return Decoder(model, stacked(model)) if is_written_out(model) else None

    def hidden(self, tokens: torch.Tensor, packing: CachePacking) -> torch.Tensor:
        """Return the last hidden states [N, hidden] of packed tokens int64 [N], then taps."""
        model = cast(PreTrainedModel, self.model)
        if self.decoder is not None:
            hidden = self.decoder.hidden(tokens, packing)
        else:
            hidden = forward_hidden(model, tokens, packing)
        return with_taps(model, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of hidden states [T, hidden], of this rank's share of the vocabulary."""
        return output_head(cast(PreTrainedModel, self.model))(last_hidden(self.model, hidden))

    def sample(
        self,
        logits: torch.Tensor,
        noise: Noise,
        num_generated: torch.Tensor,
        params: SamplingParams,
    ) -> Sampled:
        """Sample one token at each position from `logits`; see `sampling.sample`."""
        if not params.truncates and has_kernels(*self.type, SAMPLE):
            return self.ops.draw(logits, noise, params)
        return sample(logits, noise.words, num_generated, params, self.reduce_with(noise.seed))

    def reduce_with(self, seed: int | None) -> Callable:
        """Return `best_and_sum` of words that are keys, or with a seed counters."""
        return self.reduce if seed is None else partial(self.reduce, seed=seed)

    def weight(self) -> torch.Tensor:
        """Return a tensor of the type and on the device of the hidden states."""
        return next(self.model.parameters())

    def gather_text(self, text: str) -> list[str]:
        """Gather a line of every rank."""
        return [text]

    def rehearsal(self, num_tokens: Sequence[int]) -> contextlib.AbstractContextManager:
        """Context in which forwards of these sizes exchange nothing with other ranks."""
        return contextlib.nullcontext()

    def connect(self) -> None:
        """Exchange something in every size that the forwards of the last rehearsal do."""


def fold_of(model: torch.nn.Module) -> int:
    """Return how many query heads share a key/value head, in the layer where these are most."""
    config: Any = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    if config is None:
        return 1
    return max(heads.num_queries // heads.num_keys for heads in layer_heads(config))
