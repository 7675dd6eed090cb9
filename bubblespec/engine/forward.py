"""What a `ModelRunner` computes with: a model's forward over the cache, its logits and its tokens.

`ModelForward` is the model on this rank alone. Mechanisms have others over the same weights, and
several may share one cache.

Shape legend: N packed tokens, T positions sampled, V vocabulary.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.batch import Batch
from bubblespec.engine.layers import layer_heads, of_layers
from bubblespec.engine.model import forward_hidden
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import Packing
from bubblespec.engine.sampling import SamplingParams, best_and_sum, sample

Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see `sampling.sample`


class GraphMemory:
    """Memory of CUDA graphs, shared by forwards: results are valid until the next replay of any."""

    def __init__(self) -> None:
        self.pools: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by `ForwardGraphs`

    @property
    def pool(self) -> tuple | None:
        """The pool that existing graphs use."""
        return next(iter(self.pools.values()), None)


class Forward(Protocol):
    """What a `ModelRunner` computes with; the last four methods and `memory` serve CUDA graphs."""

    kernel: str  # of attention, see attention.py
    is_eager: bool  # whether nothing is captured in CUDA graphs
    memory: GraphMemory
    min_tokens: int  # of the smallest graph
    heads_per_key: int  # query heads that read keys together
    rank: int

    def hidden(self, tokens: torch.Tensor, packing: Packing) -> torch.Tensor:
        """Return the last hidden states [N, hidden] of packed tokens int64 [N]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of hidden states [T, hidden], of this rank's share of the vocabulary."""

    def sample(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        num_generated: torch.Tensor,
        params: SamplingParams,
    ) -> Sampled:
        """Sample one token at each position from `logits`; see `sampling.sample`."""

    def weight(self) -> torch.Tensor:
        """Return a tensor of the type and on the device of the hidden states."""

    def gather_text(self, text: str) -> list[str]:
        """Gather a line of every rank."""

    def rehearsal(self, num_tokens: Sequence[int]) -> contextlib.AbstractContextManager:
        """Context in which forwards of these sizes exchange nothing with other ranks."""

    def connect(self) -> None:
        """Exchange something in every size that the forwards of the last rehearsal do."""


class SlotFollower:
    """Keeps something of its own for the rows in a runner's slots, see `Runner`."""

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
    """The forward of a model on this rank alone."""

    min_tokens = 1
    rank = 0

    def __init__(
        self,
        model: torch.nn.Module,
        kernel: str = "sdpa",
        *,
        enforce_eager: bool = False,
        memory: GraphMemory | None = None,
        reduce: Callable = best_and_sum,
    ):
        """memory: of other forwards' graphs; reduce: see `best_and_sum` and compiled.py."""
        self.model, self.kernel, self.reduce = model, kernel, reduce
        self.memory = memory or GraphMemory()
        self.is_eager = enforce_eager or not can_capture(self.weight().device, kernel)
        self.heads_per_key = heads_per_key(model)

    def hidden(self, tokens: torch.Tensor, packing: Packing) -> torch.Tensor:
        """See `Forward`."""
        return forward_hidden(cast(PreTrainedModel, self.model), tokens, packing, self.kernel)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Forward`."""
        return output_head(cast(PreTrainedModel, self.model))(hidden)

    def sample(
        self,
        logits: torch.Tensor,
        keys: torch.Tensor,
        num_generated: torch.Tensor,
        params: SamplingParams,
    ) -> Sampled:
        """See `Forward`."""
        return sample(logits, keys, num_generated, params, self.reduce)

    def weight(self) -> torch.Tensor:
        """See `Forward`."""
        return next(self.model.parameters())

    def gather_text(self, text: str) -> list[str]:
        """See `Forward`."""
        return [text]

    def rehearsal(self, num_tokens: Sequence[int]) -> contextlib.AbstractContextManager:
        """See `Forward`."""
        return contextlib.nullcontext()

    def connect(self) -> None:
        """See `Forward`."""


def can_capture(device: torch.device, kernel: str) -> bool:
    """Whether a forward can be a CUDA graph: the shapes of SDPA's calls depend on lengths."""
    return device.type == "cuda" and kernel != "sdpa"


def heads_per_key(model: torch.nn.Module) -> int:
    """Return how many query heads read keys together; 1 where a sliding window forbids that."""
    config: Any = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    if config is None or any(of_layers(config, "sliding_window")):
        return 1
    return min(heads.num_queries // heads.num_keys for heads in layer_heads(config))
