"""Attention over packed tokens: one function registered with transformers, for all models that use
its attention interface.

`bubblespec_attention` receives the packing as an extra keyword of the model's forward. SDPA is the
reference on every device; `varlen` (torch) and `flash_attn` (the package) are CUDA kernels for the
same contract, each checked by a parity test.

Shape legend: N packed tokens, R rows, Q padded new tokens of a row, L attended positions, H query
heads, K key/value heads, G = H / K, D head dimension.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from bubblespec.engine.packing import PAGE, AttentionGroup, CachePacking, SequencePacking, Varlen

HALF = (torch.bfloat16, torch.float16)  # what the CUDA kernels compute in
MAX_HEAD_SIZE = 256  # of the CUDA kernels
NAME = "bubblespec"  # a name with "flash" in it would make transformers look for that package
RECORDER = "bubblespec_recorder"
_IGNORED = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "is_causal",
    "dropout",
}


def choose_kernel(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    head_sizes: frozenset[tuple[int, int]] = frozenset(),
) -> str:
    """Resolve `auto`: SDPA on CPU and for a `dtype` or `head_sizes` (see `prepare_model`) that the
    CUDA kernels do not support, else flash_attn if importable, else torch's kernel if torch is new
    enough. Raises ValueError for an impossible request."""
    unfit = sorted((key, value) for key, value in head_sizes if key != value or key > MAX_HEAD_SIZE)
    if requested == "auto":
        if device.type != "cuda" or dtype not in HALF or unfit:
            return "sdpa"
        if importlib.util.find_spec("flash_attn"):
            return "flash_attn"
        return "varlen" if _has_varlen() else "sdpa"
    if requested != "sdpa" and device.type != "cuda":
        raise ValueError(
            f"model.attention: {requested} runs on CUDA only; on {device.type} use sdpa"
        )
    if requested != "sdpa" and dtype not in HALF:
        raise ValueError(
            f"model.attention: {requested} computes in bfloat16; for "
            f"{str(dtype).partition('.')[2]} use sdpa"
        )
    if requested != "sdpa" and unfit:
        raise ValueError(
            f"model.attention: {requested} takes heads of one size up to {MAX_HEAD_SIZE}; this "
            f"model's query and key heads have {unfit[0][0]} and its value heads {unfit[0][1]}; "
            f"use sdpa"
        )
    if requested == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "model.attention: flash_attn is not installed (see requirements-flash.txt); use varlen "
            "or sdpa"
        )
    if requested == "varlen" and not _has_varlen():
        raise ValueError(
            f"model.attention: varlen needs torch 2.12 or newer, this is {torch.__version__}; use "
            f"sdpa"
        )
    return requested


@functools.cache
def _has_varlen() -> bool:
    """Whether torch's kernel can read a cache of which only a part is used."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "seqused_k" in inspect.signature(varlen_attn).parameters


def bubblespec_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing=None,
    kernel: str = "sdpa",
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """query: [1, H, N, D]; key, value: [1, K, N, D]; packing: see packing.py, or one with an
    `attend` of its own. Returns [1, N, H, D], contiguous: models take a view of it."""
    unknown = {name for name, given in kwargs.items() if given is not None and name not in _IGNORED}
    if unknown or attention_mask is not None:
        what = (
            f"the attention arguments {sorted(unknown)}"
            if unknown
            else "an attention mask of its own"
        )
        raise ValueError(f"this model passes {what}, which the generation engine does not support")
    if packing is None:
        raise ValueError(
            "this model does not pass the arguments of its forward on to its attention function, "
            "as the engine needs"
        )
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    how = {"scaling": scaling, "window": sliding_window}
    if hasattr(packing, "attend"):  # it has an attention of its own
        out = packing.attend(query, key, value, scaling=scaling)
    elif isinstance(packing, SequencePacking):
        if kernel == "sdpa":
            out = _sequences_sdpa(packing, query, key, value, **how)
        else:
            out = VARLEN_KERNELS[kernel](packing.varlen, query, key, value, **how)
    else:
        cache, layer = packing.cache, module.layer_idx
        cache.write(layer, packing.slot, packing.position, key, value)
        key, value = cache.keys[layer], cache.values[layer]
        if kernel == "sdpa":
            out = _cached_sdpa(packing, query, key, value, **how)
        else:
            flat = key.flatten(0, 1), value.flatten(0, 1)
            out = VARLEN_KERNELS[kernel](packing.varlen, query, *flat, **how)
    return out[None].contiguous(), None


AttentionInterface.register(NAME, bubblespec_attention)


class LayerMask(NamedTuple):
    """Window and mask of an attention layer in the model's own forward."""

    layer: int
    window: int | None
    """The sliding window passed to its attention function."""
    shows: Callable | None
    """Its mask as transformers defines it, a function of the row, the head and the positions of
    query and key; None if it is causal, or made by the model itself."""


def record_masks(model: torch.nn.Module, tokens: torch.Tensor) -> list[LayerMask]:
    """The mask of each attention call in the model's own forward of tokens [T]. The model keeps the
    recording attention."""
    made, seen = [], []

    def make_mask(*args, mask_function, **kwargs) -> torch.Tensor:
        made.append(
            (
                sdpa_mask(
                    *args, mask_function=mask_function, **{**kwargs, "allow_is_causal_skip": False}
                ),
                mask_function,
            )
        )
        return made[-1][0]

    def attend(
        module, query, key, value, attention_mask, sliding_window=None, **kwargs
    ) -> tuple[torch.Tensor, None]:
        shows = next((function for mask, function in made if mask is attention_mask), None)
        seen.append(LayerMask(module.layer_idx, sliding_window, shows))
        return query.new_zeros(
            1, query.shape[2], query.shape[1], value.shape[-1]
        ), None  # the result is not used

    AttentionInterface.register(RECORDER, attend)
    AttentionMaskInterface.register(RECORDER, make_mask)
    model.set_attn_implementation(RECORDER)
    model.base_model(input_ids=tokens[None], use_cache=False)
    return seen


def _cached_sdpa(
    packing: CachePacking, query, cached_key, cached_value, *, scaling, window
) -> torch.Tensor:
    padding = packing.padding
    if padding is not None:
        query = query.index_select(0, padding[0])
    attended = [
        _attend_group(packing, group, query, cached_key, cached_value, scaling, window)
        for group in packing.groups
    ]
    out = attended[0] if len(attended) == 1 else torch.cat(attended)
    return out if padding is None else out.index_select(0, padding[1])


def _attend_group(
    packing: CachePacking, group: AttentionGroup, query, cached_key, cached_value, scaling, window
) -> torch.Tensor:
    """Query heads of one key/value head are folded into the query axis, so keys and values are
    never repeated."""
    rows, queries = group.num_rows, group.num_queries
    num_heads, kv_heads = query.shape[1], cached_key.shape[2]
    fold = num_heads // kv_heads
    query = query[group.places].reshape(rows, queries, kv_heads, fold, -1).permute(0, 2, 3, 1, 4)
    query = query.reshape(rows, kv_heads, fold * queries, -1)
    slots = slice(group.first_slot, group.first_slot + rows)
    key, value = (t[slots, : group.length].transpose(1, 2) for t in (cached_key, cached_value))
    mask = packing.mask(group, fold, window, query.dtype)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    out = out.reshape(rows, kv_heads, fold, queries, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * queries, num_heads, -1)


def _sequences_sdpa(
    packing: SequencePacking, query, key, value, *, scaling, window
) -> torch.Tensor:
    fold = query.shape[1] // key.shape[1]
    groups, packed_order = packing.groups
    attended = []
    for num_sequences, length, gather, keep in groups:
        q, k, v = (
            t.index_select(0, gather).unflatten(0, (num_sequences, length))
            for t in (query, key, value)
        )
        if fold > 1:
            k, v = k.repeat_interleave(fold, dim=2), v.repeat_interleave(fold, dim=2)
        mask = None
        if window is not None and window < length:
            position = torch.arange(length, device=q.device)
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < window)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
        )
        attended.append(out.transpose(1, 2).flatten(0, 1).index_select(0, keep))
    return torch.cat(attended).index_select(0, packed_order)


def _varlen(v: Varlen, query, key, value, *, scaling, window) -> torch.Tensor:
    """torch's variable-length kernel; one split, so that a row's result does not depend on the
    other rows."""
    look_back = -1 if window is None else window - 1
    tensors = query.contiguous(), key.contiguous(), value.contiguous(), v.cu_q, v.cu_k
    if not _has_varlen():
        # benchmarks/gpu_suite.py runs on torch 2.11 too, where the operator knows `seqused_k`
        # already, and never splits.
        keys = {"window_size_left": look_back, "window_size_right": 0, "seqused_k": v.used}
        return torch.ops.aten._flash_attention_forward(
            *tensors, v.max_q, v.max_k, 0.0, look_back < 0, False, scale=scaling, **keys
        )[0]
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        *tensors,
        v.max_q,
        v.max_k,
        scale=scaling,
        window_size=(look_back, 0),
        enable_gqa=query.shape[1] != key.shape[1],
        seqused_k=v.used,
        num_splits=None if v.used is None else 1,
    )


def _flash(v: Varlen, query, key, value, *, scaling, window) -> torch.Tensor:
    """The flash_attn package has no `seqused_k`; its paged form expresses the same."""
    from flash_attn import flash_attn_varlen_func

    cu_k, options = v.cu_k, {}
    if v.used is not None:
        cu_k, options["block_table"] = v.paged
        key, value = (t.view(-1, PAGE, *t.shape[1:]) for t in (key, value))
    return flash_attn_varlen_func(
        query.contiguous(),
        key,
        value,
        v.cu_q,
        cu_k,
        v.max_q,
        v.max_k,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )


VARLEN_KERNELS = {"varlen": _varlen, "flash_attn": _flash}
