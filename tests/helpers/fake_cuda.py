"""CUDA tensors without values and without a GPU: shapes, types and devices alone.

`FakeCuda` raises where tensors of two devices meet, where a kernel lacks a given keyword, and where
a shape depends on values, and records where the host would wait for the GPU.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

import bubblespec
from bubblespec.engine.attention import NAME
from bubblespec.engine.output_head import OutputHead
from tests.helpers.models import VOCAB, small_config

DEVICE = torch.device("cuda", 0)
SOURCES = str(Path(bubblespec.__file__).parent)
aten = torch.ops.aten
# They make no tensor, or touch a few columns of it; `prims` are what others are made of.
NO_PASS = {aten.gather.default, aten.empty_strided.default, aten.new_empty.default}
NO_PASS |= {aten.index.Tensor, aten.index_put.default}
ON_THE_WAY_TO_NUMPY = {aten.detach.default, aten.to.dtype_layout}
ON_THE_WAY_TO_NUMPY |= {aten.resolve_conj.default, aten.resolve_neg.default}


class FakeCuda(FakeTensorMode):
    """Context in which tensors are fake, and `DEVICE` is a GPU."""

    def __init__(self):
        super().__init__()
        # Values that the host reads of a tensor.
        self.answer = lambda tensor: np.zeros(tuple(tensor.shape))
        self.clear()

    def clear(self) -> None:
        self.waits: list[str] = []  # "file.function" of values read, and of copies that block
        self.uploads = 0  # copies to the device
        self.largest_double = 0  # elements of the largest float64 tensor on the device
        self.products: set[torch.dtype] = set()  # types in matrix products and attention kernels
        self.calls: Counter[str] = Counter()
        self.large, self.passes = sys.maxsize, 0  # operations on `large` elements or more

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # A torch without CUDA has no guard and no gradient thread for such a device, so compiled
        # code sees the meta device.
        if function is torch.ops.prim.device.default:
            return torch.device("meta")
        kwargs = dict(kwargs or {})
        if "device" in kwargs and kwargs["device"] is not None and kwargs["device"].type == "meta":
            kwargs["device"] = DEVICE
        if function in ON_THE_WAY_TO_NUMPY and not isinstance(args[0], FakeTensor):
            return args[0]  # what `_read` has given
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_gpu = any(t.device.type == "cuda" for t in tensors)
        is_read = function is aten._local_scalar_dense.default
        if on_gpu and (is_read or kwargs.get("device") == torch.device("cpu")):
            return self._read(function, args[0])
        if function in (aten._to_copy.default, aten.copy_.default):
            self._upload(function, args, kwargs)
        elif on_gpu:
            self._check(function, args, kwargs)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if function is aten.lift_fresh.default:
            result.constant = None  # else what is done to single numbers is done to real ones
        is_part = function.namespace == "prims"
        if not (is_part or function.is_view or function in NO_PASS):
            touched = (*tensors, *tree_leaves(result))
            sizes = [t.numel() for t in touched if isinstance(t, torch.Tensor)]
            self.passes += max(sizes, default=0) >= self.large
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and is_on_gpu(tensor, torch.float64):
                self.largest_double = max(self.largest_double, tensor.numel())
        return result

    def _read(self, function, tensor: torch.Tensor):
        self.waits.append(place())
        with _disable_current_modes():
            values = torch.as_tensor(self.answer(tensor)).to(tensor.dtype)
            return values.item() if function is aten._local_scalar_dense.default else values.clone()

    def _upload(self, function, args, kwargs) -> None:
        target, source = args[:2] if function is aten.copy_.default else (None, args[0])
        to = torch.device(kwargs.get("device") or source.device)
        to = to if target is None else target.device
        if source.device.type == to.type:
            return
        assert to.type == "cuda", f"{place()}: a copy into memory of the host that exists"
        self.uploads += 1
        is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if not is_async:
            self.waits.append(place())

    def _check(self, function, args, kwargs) -> None:
        """Find what fake tensors can do, but a GPU cannot, or only after the host has waited."""
        name = function.name()
        if name.startswith(INDEXING):
            for index in args[1]:
                assert index is None or is_on_gpu(index, torch.int64), f"{place()}: {index}"
        if name == "aten::segment_reduce" and not kwargs.get("unsafe"):
            self.waits.append(place())  # it looks whether the lengths fit
        if name == "torch_attn::_varlen_attn":
            names = [argument.name for argument in function._schema.arguments]
            bound = dict(zip(names, args, strict=False)) | kwargs
            lengths = (bound.get("seqused_k"), *args[5:7])
            check_attention(*args[:5], *lengths, bound.get("block_table"))
            assert all(t.is_contiguous() for t in args[:3]), f"{place()}: not contiguous"
        if name in PRODUCTS:
            tensors = (t for t in tree_leaves(args) if isinstance(t, torch.Tensor))
            given = {t.dtype for t in tensors if t.is_floating_point()}
            assert len(given) == 1, f"{place()}: a product of {given}"
            self.products |= given
        self.calls[name] += 1


INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put", "aten::_unsafe_index")
PRODUCTS = {f"aten::{name}" for name in ("mm", "addmm", "linear", "scaled_dot_product_attention")}


def place() -> str:
    """Return the innermost function of this project that is running, "file.function"."""
    frame = sys._getframe(1)
    while not frame.f_code.co_filename.startswith(SOURCES):
        frame = frame.f_back
        if frame is None:
            return "the test itself"
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


PAGE_DIVISOR = 256  # positions of a page must be a multiple


def check_attention(query, key, value, cu_q, cu_k, used, max_q, max_k, block_table) -> None:
    """Check the requirements of kernels for variable lengths."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    lengths = [t for t in (cu_q, cu_k, used) if t is not None]
    assert all(is_on_gpu(t, torch.int32) and t.is_contiguous() for t in lengths)
    assert all(t.device == DEVICE for t in (query, key, value)) and len(cu_q) == len(cu_k)
    assert type(max_q) is type(max_k) is int and 0 < max_q <= max_k
    if block_table is not None:
        assert is_on_gpu(block_table, torch.int32) and block_table.stride(-1) == 1
        assert key.ndim == value.ndim == 4 and key.shape[1] % PAGE_DIVISOR == 0
        assert len(block_table) == len(cu_q) - 1
        assert block_table.shape[1] * key.shape[1] >= max_k


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """Stand in for flash_attn 2.8, with its signature and requirements."""
    lengths = (cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k)
    check_attention(q, k, v, *lengths, block_table)
    assert causal == (window_size[1] == 0) and dropout_p == 0.0
    assert causal or (max_seqlen_q == 1 and len(q) == len(cu_seqlens_q) - 1)
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    return q + (k.sum() + v.sum()) * 0.0


def is_on_gpu(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.device == DEVICE and tensor.dtype == dtype


def make_fake(name: str = "llama", num_layers: int = 1) -> transformers.PreTrainedModel:
    config = small_config(name)
    config.num_hidden_layers = num_layers
    with DEVICE:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_attn_implementation(NAME)
    model.to_logits = OutputHead(model.lm_head, VOCAB)
    assert model.device == DEVICE and model.dtype == torch.bfloat16
    return model
