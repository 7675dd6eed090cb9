"""Attention over packed tokens: one function for all models with transformers' interface.

`bubblespec_attention` receives the packing as an extra keyword of the model's forward. SDPA is the
reference on every device; `varlen` (torch) and `flash_attn` (the package) are CUDA kernels for the
same contract; kernels.py chooses.

Shape legend: N packed tokens, R rows, Q padded new tokens of a row, L attended positions, H query
heads, K key/value heads, G = H / K, D head dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from bubblespec.engine.ops.torch_ops import attend
from bubblespec.engine.packing import PAGE, SequencePacking, Varlen

NAME = "bubblespec"  # a name with "flash" in it would make transformers look for that package
# Whether torch's function reads a cache in pages, in one split where that is asked for. Torch 2.12
# has the arguments too, but its FlashAttention-2 refuses `num_splits`.
HAS_PAGES = torch.__version__ >= (2, 13)  # type: ignore[operator]  # a TorchVersion compares
_IGNORED = {"position_ids", "cache_position", "use_cache", "is_causal", "dropout"}
_IGNORED |= {"output_attentions", "output_hidden_states"}


def reads_pages(kernel: str) -> bool:
    """Whether the kernel reads keys and values by a block table. SDPA has to gather them."""
    return kernel == "flash_attn" or (kernel == "varlen" and HAS_PAGES)


def bubblespec_attention(
    module, query, key, value, attention_mask, scaling=None, sliding_window=None, packing=None,
    kernel: str = "sdpa", **kwargs,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Return [1, N, H, D], contiguous, of query [1, H, N, D] and key and value [1, K, N, D].

    packing: see packing.py, or an object with a method `attend`."""
    unknown = {name for name, given in kwargs.items() if given is not None and name not in _IGNORED}
    if unknown or attention_mask is not None:
        own = f"the attention arguments {sorted(unknown)}" if unknown else "an attention mask"
        raise ValueError(f"this model passes {own} of its own, which the engine does not support")
    if packing is None:
        raise ValueError(
            "this model does not pass its forward's arguments to its attention function, which the "
            "engine needs"
        )
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    how = {"scaling": scaling, "window": sliding_window}
    if hasattr(packing, "attend"):
        out = packing.attend(module.layer_idx, query, key, value, **how)
    elif isinstance(packing, SequencePacking):
        run = _sequences_sdpa if kernel == "sdpa" else VARLEN_KERNELS[kernel]
        packing = packing if kernel == "sdpa" else packing.varlen
        out = run(packing, query, key, value, **how)
    else:
        layer = packing.cache.write(module.layer_idx, packing.place, key, value)
        key, value = layer.keys, layer.values
        if kernel == "sdpa":
            out = attend(query, packing, layer, scaling, sliding_window)
        else:
            if packing.cache.pages is None:
                key, value = key.flatten(0, 1), value.flatten(0, 1)
            out = VARLEN_KERNELS[kernel](packing.varlen, query, key, value, **how)
    return out[None].contiguous(), None


AttentionInterface.register(NAME, bubblespec_attention)


def _sequences_sdpa(packing: SequencePacking, query, key, value, *, scaling, window):
    fold = query.shape[1] // key.shape[1]
    groups, packed_order = packing.groups
    attended = []
    for num_sequences, length, gather, keep in groups:
        rows = (num_sequences, length)
        q, k, v = (t.index_select(0, gather).unflatten(0, rows) for t in (query, key, value))
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


def _has_one_query(v: Varlen, window: int | None) -> bool:
    """Whether each sequence i has one query, token i, which sees all keys of its sequence.

    Only without a bound does FlashAttention-2 fold the query heads of a key/value head into the
    query axis, so that a decoding row reads its keys once."""
    return v.used is not None and v.max_q == 1 and window is None


def varlen(v: Varlen, query, key, value, *, scaling, window, alone=False) -> torch.Tensor:
    """Attend by torch's variable-length kernel. alone: a row's result is independent of others."""
    tensors: tuple = query.contiguous(), key.contiguous(), value.contiguous(), v.cu_q, v.cu_k
    back, right = -1 if window is None else window - 1, 0
    has_groups = query.shape[1] != key.shape[-2]
    # Keys of one row are split over the GPU where few rows decode, which their number decides.
    # Unless heads are folded, splits leave rows unwritten (pytorch issue 194167).
    num_splits: int | None = 1
    if _has_one_query(v, window) and not alone:
        right, num_splits = -1, None if has_groups else 1
    if not HAS_PAGES:  # the operator below it knows `seqused_k`, and splits folded heads only
        given = {"window_size_left": back, "window_size_right": right, "seqused_k": v.used}
        rest = (v.max_q, v.max_k, 0.0, back < 0 and right == 0, False)
        return torch.ops.aten._flash_attention_forward(*tensors, *rest, scale=scaling, **given)[0]
    options: dict = {"enable_gqa": has_groups, "seqused_k": v.used, "window_size": (back, right)}
    if v.used is not None:
        options["num_splits"] = num_splits
    if v.block_table is not None:
        cu_k, options["block_table"] = v.paged
        # FlashAttention-2 needs both, FlashAttention-3 refuses both.
        tensors = (*tensors[:4], None if current_flash_attention_impl() == "FA3" else cu_k)
    attend: Callable[..., Any] = varlen_attn
    return attend(*tensors, v.max_q, v.max_k, scale=scaling, **options)


def _flash(v: Varlen, query, key, value, *, scaling, window) -> torch.Tensor:
    """Call the flash_attn package: it has no `seqused_k`, its paged form expresses the same."""
    from flash_attn import flash_attn_varlen_func

    has_bound = not _has_one_query(v, window)
    cu_k, options = v.cu_k, {"softmax_scale": scaling, "causal": has_bound}
    options["window_size"] = (-1 if window is None else window - 1, 0 if has_bound else -1)
    if v.used is not None:
        cu_k, options["block_table"] = v.paged
        if v.block_table is None:
            key, value = (t.view(-1, PAGE, *t.shape[1:]) for t in (key, value))
    lengths = (v.cu_q, cu_k, v.max_q, v.max_k)
    return flash_attn_varlen_func(query.contiguous(), key, value, *lengths, **options)


VARLEN_KERNELS = {"flash_attn": _flash, "varlen": varlen}  # the first one that works is taken
