"""The runner of a forward that all ranks compute together: `ModelRunner` with slices of the weights
(slices.py).

All ranks plan the same forward (the same rows in the same slots), hold keys and values of their own
heads alone, and get the same tokens. On GPUs such forwards are CUDA graphs too, with the sums over
ranks inside (shared_graphs.py).
"""

from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import TOLERANCE, forward_hidden, output_head, random_tokens
from bubblespec.engine.packing import CachePacking, pack_rows
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.shared_graphs import SharedGraphs
from bubblespec.engine.slices import CannotCut, Joint, cut, head_slice, plan_cuts, sample_slices
from bubblespec.errors import EndsRun

CHECKED = 12  # tokens
MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
)  # of code that expects all of its heads


class SharedRunner(ModelRunner):
    """A `Runner` of one of several ranks that run in lockstep."""

    def __init__(
        self,
        model: PreTrainedModel,
        num_slots: int,
        max_length: int,
        seed: int,
        joint: Joint,
        *,
        enforce_eager: bool = False,
        beside: ForwardGraphs | None = None,
        **options,
    ):
        """enforce_eager, options: as of `ModelRunner`; beside: graphs whose memory these share.
        Raises CannotCut for a model that so many ranks cannot share."""
        super().__init__(
            model,
            num_slots,
            max_length,
            seed,
            enforce_eager=enforce_eager or not joint.can_capture,
            **options,
        )
        self.joint, self.cuts = joint, plan_cuts(model, joint.rank, joint.size)
        if self.graphs is not None:
            parts = {"cuts": self.cuts, "joint": joint, "beside": beside}
            self.graphs = SharedGraphs(
                model, self.cache, self.kernel, self.max_batch_tokens, **parts
            )
        head = output_head(model)
        self.head = partial(head_slice, head, joint)
        self.sample = partial(sample_slices, vocab_size=head.out_features, joint=joint)

    def _launch(self, tokens: np.ndarray, packing: CachePacking) -> torch.Tensor:
        with cut(self.cuts, self.joint):
            return super()._launch(tokens, packing)

    @torch.inference_mode()
    def check(self) -> None:
        """On all ranks together: whether slices give what the whole model gives. Raises CannotCut
        on all of them if not."""
        tokens, name = random_tokens(self.model, CHECKED), type(self.model).__name__
        count = np.array([CHECKED])
        try:
            with cut(self.cuts, self.joint):
                hidden = forward_hidden(
                    self.model,
                    tokens,
                    pack_rows(KVCache(1, CHECKED), 0 * count, count, self.device),
                )
        except EndsRun:  # a rank is missing
            raise
        except MODEL_ERRORS as error:  # alike on all ranks: before the first sum of a layer
            raise CannotCut(
                f"the forward of {name} in slices fails: {' '.join(str(error).split())}"
            ) from error
        whole = forward_hidden(
            self.model, tokens, pack_rows(KVCache(1, CHECKED), 0 * count, count, self.device)
        )
        difference = (hidden - whole).abs().max() / whole.abs().max().clamp(min=1.0)
        worst = self.joint.gather(difference.double()[None]).max().item()
        if not worst <= TOLERANCE.get(self.model.dtype, 0.1):
            raise CannotCut(
                f"{name} computed in slices, as base_model_tp_plan of its configuration says, differs from "
                f"the whole model by {worst:.1e}"
            )
