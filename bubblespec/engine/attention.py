"""Attention over packed tokens: one function for all models with transformers' interface.

`bubblespec_attention` receives the packing as an extra keyword of the model's forward. Over a cache
it calls the operations of ops/. Over whole sequences, in training, SDPA is the reference on every
device, and an explicit softmax where a layer has a cap or sinks; `varlen` (torch), `flash_attn` and
`flash_attn_3` (packages) are CUDA kernels for windows alone, and read parts of one product with
queries, keys and values in place.

Shape legend: N packed tokens, H query heads, K key/value heads, D head dimension, V vocabulary.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from bubblespec.engine.model import SequencePacking
from bubblespec.engine.ops import TYPES, ops_for
from bubblespec.engine.ops.softmax import AttentionOptions, attend_heads
from bubblespec.errors import fallback, first_problem, one_line

NAME = "bubblespec"  # a name with "flash" in it would make transformers look for that package
# Whether torch's function takes windows and groups of heads.
HAS_WINDOWS = torch.__version__ >= (2, 13)  # type: ignore[operator]  # a TorchVersion compares
MAX_HEAD_SIZE = 256  # in the CUDA kernels
_IGNORED = {"position_ids", "cache_position", "use_cache", "is_causal", "dropout"}
_IGNORED |= {"output_attentions", "output_hidden_states"}
_OPTIONS = {"scaling", "sliding_window", "softcap", "s_aux"}


def bubblespec_attention(
    module, query, key, value, attention_mask, packing=None, kernel: str = "sdpa", **kwargs
) -> tuple[torch.Tensor, None]:
    """Return [1, N, H, D], contiguous, of query [1, H, N, D] and key and value [1, K, N, D].

    packing: see model.py, or an object with a method `attend`; kernel: of whole sequences."""
    known = _IGNORED | _OPTIONS
    unknown = {name for name, given in kwargs.items() if given is not None and name not in known}
    if unknown or attention_mask is not None:
        own = f"the attention arguments {sorted(unknown)}" if unknown else "an attention mask"
        raise ValueError(f"this model passes {own} of its own, which the engine does not support")
    if packing is None:
        raise ValueError(
            "this model does not pass its forward's arguments to its attention function, which the "
            "engine needs"
        )
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
    options = options_of(module, **kwargs)
    if isinstance(packing, SequencePacking):
        out = KERNELS[kernel](packing, query, key, value, options)
    elif hasattr(packing, "attend"):
        out = packing.attend(module.layer_idx, query, key, value, options)
    else:
        cache = packing.cache.write(module.layer_idx, packing.place, key, value)
        ops = ops_for(query.device, query.dtype)
        out = ops.attend(query, packing, cache, options)
    return out[None].contiguous(), None


AttentionInterface.register(NAME, bubblespec_attention)


def options_of(
    module, scaling, sliding_window=None, softcap=None, s_aux=None, **kwargs
) -> AttentionOptions:
    """Return the options of a layer that calls its attention function with these arguments.

    Chunks are in the configuration and in masks only."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    is_chunked = kinds is not None and kinds[module.layer_idx] == "chunked_attention"
    chunk = config.attention_chunk_size if is_chunked else None
    return AttentionOptions(scaling, sliding_window, softcap, s_aux, chunk)


@contextlib.contextmanager
def own_modules(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model's modules attend with SDPA, or if they cannot, eagerly."""
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


def _sdpa(packing: SequencePacking, query, key, value, options: AttentionOptions) -> torch.Tensor:
    queries_per_kv = query.shape[1] // key.shape[1]
    groups, packed_order = packing.groups
    attended = []
    for num_sequences, length, gather, keep in groups:
        rows = (num_sequences, length)
        q, k, v = (t.index_select(0, gather).unflatten(0, rows) for t in (query, key, value))
        if queries_per_kv > 1:
            k, v = (
                k.repeat_interleave(queries_per_kv, dim=2),
                v.repeat_interleave(queries_per_kv, dim=2),
            )
        mask = None
        if min(options.window or length, options.chunk or length) < length:
            position = torch.arange(length, device=q.device)
            first = options.first_key(position)
            mask = (position <= position[:, None]) & (position >= first[:, None])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attend_heads(q, k, v, mask, options, is_causal=mask is None)
        attended.append(out.transpose(1, 2).flatten(0, 1).index_select(0, keep))
    return torch.cat(attended).index_select(0, packed_order)


class NotComputed(ValueError):
    """A kernel of training does not compute the attention of a layer."""


def _varlen(packing: SequencePacking, query, key, value, options: AttentionOptions) -> torch.Tensor:
    (offsets, longest), back = packing.varlen, _keys_back(options)
    scaling = options.scaling
    tensors = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)]
    if not HAS_WINDOWS:  # the operator below it does
        given = {"window_size_left": back, "window_size_right": 0}
        rest = (longest, longest, 0.0, back < 0, False)
        of = torch.ops.aten._flash_attention_forward
        return of(*tensors, offsets, offsets, *rest, scale=scaling, **given)[0]
    more: dict = {"enable_gqa": query.shape[1] != key.shape[1], "window_size": (back, 0)}
    attend: Callable = varlen_attn
    return attend(*tensors, offsets, offsets, longest, longest, scale=scaling, **more)


def _flash(
    packing: SequencePacking, query, key, value, options: AttentionOptions, package="flash_attn"
) -> torch.Tensor:
    attend = importlib.import_module(package).flash_attn_varlen_func
    offsets, longest = packing.varlen
    window = _keys_back(options), 0
    more = {"softmax_scale": options.scaling, "causal": True, "window_size": window}
    out = attend(query, key, value, offsets, offsets, longest, longest, **more)
    return out[0] if isinstance(out, tuple) else out  # an older one returns the logsumexp, too


def _keys_back(options: AttentionOptions) -> int:
    """Return how many keys before its own a query sees, -1 for all. Raises NotComputed."""
    if not options.has_only_a_window:
        raise NotComputed("computes no caps, sinks and chunks of attention; set sdpa")
    return -1 if options.window is None else options.window - 1


# Kernels of training; `auto` takes the first one that works.
PACKAGES = {"flash_attn_3": "flash_attn_interface", "flash_attn": "flash_attn"}
KERNELS: dict[str, Callable] = {name: partial(_flash, package=p) for name, p in PACKAGES.items()}
KERNELS |= {"varlen": _varlen, "sdpa": _sdpa}
HOPPER = 9  # the compute capability that flash_attn_3 is written for


def choose_kernel(
    requested: str,
    model: PreTrainedModel,
    head_sizes: frozenset[tuple[int, int]],
    difference_of: Callable[[str], str | None],
    gather_text: Callable[[str], list[str]] = lambda text: [text],
) -> tuple[str, str | None]:
    """Choose the kernel of training, together with all ranks; with a line if `auto` falls back.

    head_sizes: see `prepare_model`; difference_of: how a kernel differs from SDPA beyond rounding.
    Raises ValueError if a requested kernel cannot be used."""
    is_auto, problems = requested == "auto", []
    wanted = [k for k in KERNELS if k not in PACKAGES or importlib.util.find_spec(PACKAGES[k])]
    if model.device.type != "cuda":
        wanted = ["sdpa"]
    for kernel in wanted if is_auto else [requested]:
        problem = None
        if kernel != "sdpa":
            own = problem_of(kernel, model.device, model.dtype, head_sizes)
            problem = first_problem(own or _failure_or(difference_of, kernel), gather_text)
        if problem is None:
            break
        problems.append(f"{kernel} {problem}")
    if not is_auto and problems:
        raise ValueError(f"model.attention: {problems[0]}")
    if not problems:
        return kernel, None
    return kernel, fallback(
        f"attention in training is {kernel}", "; ".join(problems), f"model.attention={kernel}"
    )


def _failure_or(difference_of: Callable[[str], str | None], kernel: str) -> str | None:
    try:
        return difference_of(kernel)
    except NotComputed as error:
        return str(error)
    except Exception as error:  # a package built for another torch, a driver, the kernel itself
        return f"fails: {one_line(error)}"


def problem_of(
    kernel: str, device: torch.device, dtype: torch.dtype, head_sizes: frozenset[tuple[int, int]]
) -> str | None:
    """Return why a CUDA kernel cannot be used, after its name; None where it can."""
    unfit = sorted((key, value) for key, value in head_sizes if key != value or key > MAX_HEAD_SIZE)
    if device.type != "cuda":
        return f"runs on CUDA only; set sdpa on {device.type}"
    if dtype not in TYPES:
        return f"computes in bfloat16 only; set sdpa for {str(dtype).partition('.')[2]}"
    if unfit:
        return (
            f"takes heads of one size up to {MAX_HEAD_SIZE}; this model's query and key heads have "
            f"{unfit[0][0]} and its value heads {unfit[0][1]}; set sdpa"
        )
    if kernel in PACKAGES and importlib.util.find_spec(PACKAGES[kernel]) is None:
        return "is not installed (see requirements-flash.txt); set varlen or sdpa"
    if kernel == "flash_attn_3" and torch.cuda.get_device_capability(device)[0] != HOPPER:
        return "is for GPUs of compute capability 9; set flash_attn or varlen"
    return None
