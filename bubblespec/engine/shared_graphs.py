"""CUDA graphs of forwards that all ranks compute together, with the sums over ranks inside.

A sum in a graph waits for the same graph on the other ranks. So all ranks have graphs, captured in
the same order, or none has any; and a rank on which something fails must not leave the others in a
sum that it never comes to. So nothing is exchanged in either of the two stages of capturing, and
after each the ranks tell each other how it went:

1. Every rank runs each forward without its sums. What may fail on one rank alone, such as memory
   that runs out, fails here.
2. Each records its graphs: a sum that is recorded is not computed, and nobody waits.

Between the two the ranks add up zeros in every size that the graphs will, as NCCL connects them
when it first meets a size.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from bubblespec.engine.graphs import ForwardGraphs, Shape
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.slices import Cut, Joint, cut

T = TypeVar("T")


class SharedGraphs(ForwardGraphs):
    """`ForwardGraphs` of a forward in slices. All ranks call `forward` with the same packing, in
    the same order, and `clear` alike."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        kernel: str,
        max_batch_tokens: int,
        *,
        cuts: list[Cut],
        joint: Joint,
        beside: ForwardGraphs | None = None,
    ):
        """cuts: this rank's part of the model; beside: graphs that share memory with these,
        whichever are captured first."""
        super().__init__(model, cache, kernel, max_batch_tokens, beside=beside)
        self.cuts, self.joint = cuts, joint
        if beside is not None:
            beside.beside = self

    def _capture(self) -> None:
        """Graphs of all shapes on all ranks, or of none on any."""
        made = self._on_all(lambda: (self._zeros(), self._rehearse()))
        if made is not None:
            zeros, inputs = made
            for tensor in zeros:
                self.joint.sum_(tensor)
            self._on_all(lambda: self._record(inputs))

    def _zeros(self) -> list[torch.Tensor]:
        """Of every size that is summed in a graph, largest first."""
        weight = next(self.model.parameters())
        widths = {part.module.out_features for part in self.cuts if part.is_rowwise}
        sizes = sorted(
            {shape.tokens * width for shape in self.shapes for width in widths}, reverse=True
        )
        largest = weight.new_zeros(sizes[0])
        return [largest[:size] for size in sizes]

    def _rehearse(self) -> dict[Shape, torch.Tensor]:
        with cut(self.cuts, _Alone()):
            return super()._rehearse()

    def _record(self, inputs: dict[Shape, torch.Tensor]) -> None:
        with cut(self.cuts, self.joint):
            super()._record(inputs)

    def _on_all(self, stage: Callable[[], T]) -> T | None:
        """What a stage returns, in which nothing is exchanged; None, and no rank has graphs, if it
        fails on any rank."""
        made, problem = None, None
        try:
            made = stage()
        except RuntimeError as error:  # the model's own code runs here
            problem = error
        failed = self.joint.gather(
            torch.full((1,), float(problem is not None), device=self.model.device)
        )
        if failed.cpu().numpy().any():
            self._go_without(problem)
            return None
        return made

    def _go_without(self, error: RuntimeError | None) -> None:
        """error: None where it is another rank's, which says it."""
        if error is not None:
            super()._go_without(error)
        self.clear()
        self.is_off = True


class _Alone:
    """What layers see of a `Joint`, without other ranks: what they compute has the right shape, and
    means nothing."""

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor
