"""transformers' layers with a state over packed tokens.

Their modules pass their keyword arguments on to functions of the file that they are in: a causal
convolution, and a gated delta rule or a scan (Mamba-2). These are replaced by functions that know
the packing; without one they compute what they did. What a module does around them stays its own.

transformers computes the rules in float32, whatever a model's type; here a float64 model's are
computed in float64.

Shape legend: N packed tokens, H heads, G key heads, K and V width of keys and values, C channels.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from bubblespec.engine.model import SequencePacking
from bubblespec.engine.ops import STATES, has_kernels
from bubblespec.engine.ops import torch_states as ops
from bubblespec.engine.states import WINDOWS, advance, convolve, split

NUMBER = "state_layer"  # keyword argument: the number of a layer
# Names, in families' modules, of the numbers of value and key heads, and of their sizes.
SIZES = (
    ("num_v_heads", "num_heads"),
    ("num_k_heads", "n_groups"),
    ("head_k_dim", "ssm_state_size"),
    ("head_v_dim", "head_dim"),
)
CHUNK = 64  # tokens of whole sequences that are computed at once
ORIGINAL = "_bubblespec_original"  # attribute of a function


def serve_states(model: PreTrainedModel) -> list[int]:
    """Let a model's layers with a state compute packed tokens; return their numbers."""
    numbers = []
    for module in _with_state(model):
        home = sys.modules[type(module).__module__]
        for name in FUNCTIONS:
            function = getattr(home, name, None)
            if function is not None and not hasattr(function, ORIGINAL):
                setattr(home, name, _replacing(function, FUNCTIONS[name]))
        if "forward" not in vars(module):
            module.forward = functools.partial(module.forward, **{NUMBER: module.layer_idx})
        numbers.append(module.layer_idx)
    return sorted(numbers)


class StateShape(NamedTuple):
    """Sizes of a layer with a state; without heads it is a convolution alone."""

    channels: int
    taps: int
    heads: int
    key_heads: int
    key: int
    value: int
    has_beta: bool  # whether it computes a delta rule


def state_shapes(model: PreTrainedModel) -> list[StateShape]:
    """Return the sizes of each layer of a model that has a state."""
    shapes = []
    for module in _with_state(model):
        conv = next(of for of in module.children() if isinstance(of, nn.Conv1d))
        heads, key_heads, key, value = (_first(module, names) for names in SIZES)
        sizes = conv.in_channels, conv.kernel_size[0], heads, key_heads, key, value
        shapes.append(StateShape(*sizes, has_beta=hasattr(module, "head_k_dim")))
    return shapes


def state_bytes(model: PreTrainedModel, device: str) -> int:
    """Return the bytes of one row's states, see `StateCache`; device: its type."""
    in_kernels = has_kernels(torch.device(device), model.dtype, STATES)
    waiting, of_type = WINDOWS["cuda" if in_kernels else device], model.dtype.itemsize
    size = 0
    for shape in state_shapes(model):
        size += of_type * shape.channels * (shape.taps - 1 + waiting)
        key, value, wide = shape.key, shape.value, max(of_type, 4) * shape.heads
        size += wide * key * value  # the state; what a window adds, its decays and its keys
        size += wide * waiting * (value + (2 if in_kernels else 1))
        size += waiting * key * (2 * shape.key_heads * of_type if in_kernels else wide)
    return size


def _with_state(model: PreTrainedModel) -> Iterator[Any]:
    for module in model.modules():
        number, parts = getattr(module, "layer_idx", None), module.children()
        is_causal = any(isinstance(of, nn.Conv1d) for of in parts)
        home = sys.modules[type(module).__module__]
        if isinstance(number, int) and is_causal and hasattr(home, "causal_conv1d_fn"):
            yield module


def _first(module: Any, names: tuple[str, ...]) -> int:
    return next((getattr(module, name) for name in names if hasattr(module, name)), 0)


def _replacing(original: Callable, compute: Callable) -> Callable:
    @functools.wraps(original)
    def replaced(*args, packing: Any = None, **kwargs):
        if packing is None:
            return original(*args, **kwargs)
        return compute(packing, *args, **kwargs)

    vars(replaced)[ORIGINAL] = original
    return replaced


def _convolution(
    packing, hidden_states, weight, bias=None, activation=None, *, state_layer, **kwargs
) -> torch.Tensor:
    """Return [1, C, N] of hidden states [1, C, N], a weight [C, k] and a bias [C]."""
    x, has_silu = hidden_states[0].t(), activation in ("silu", "swish")
    if isinstance(packing, SequencePacking):
        out, has_silu = ops.taps_of_sequences(x, packing.position, weight, bias), False
    else:
        out = convolve(packing, state_layer, x, weight, bias, has_silu)
        out = packing.windows.packed(out)
    return (out if has_silu or activation is None else ACT2FN[activation](out)).t()[None]


def _delta_rule(
    packing, query, key, value, g, beta, *, state_layer, use_qk_l2norm_in_kernel=False, **kwargs
) -> tuple[torch.Tensor, None]:
    """Return [1, N, H, V] of query and key [1, N, G, K], value [1, N, H, V], g, beta [1, N, H]."""
    how = {"scale": key.shape[-1] ** -0.5, "is_unit": use_qk_l2norm_in_kernel}
    rates = _wide(torch.stack((g[0], beta[0].to(g.dtype)), 1)).unbind(1)
    out = _advance(packing, state_layer, query[0], key[0], value[0], *rates, **how)
    return out.to(query.dtype)[None], None


def _scan(
    packing, hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, dt_softplus=False,
    dt_limit=(0.0, float("inf")), return_final_states=False, *, state_layer, **kwargs,
) -> torch.Tensor | tuple[torch.Tensor, None]:  # fmt: skip
    """Return [1, N, H, V] of hidden states [1, N, H, V], B and C [1, N, G, K], dt [1, N, H]."""
    dt = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    x, k, q, dt = (_wide(of) for of in (hidden_states[0], B[0], C[0], dt))
    out = _advance(packing, state_layer, q, k, x * dt.unsqueeze(-1), A.to(x.dtype) * dt)
    if D is not None:
        out = out + D.unsqueeze(-1) * x
    return (out[None], None) if return_final_states else out[None]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _advance(packing, layer: int, q, k, v, log_decay, beta=None, **how) -> torch.Tensor:
    """Return outputs [N, H, V]; see `states.advance`."""
    qk = torch.stack((q, k), 1)
    if isinstance(packing, SequencePacking):
        q, k = split(qk, v.shape[1], how.get("scale", 1.0), how.get("is_unit", False))
        return _whole(packing, q, k, _wide(v), log_decay, beta)
    windows = packing.windows
    fed: Any = (of if of is None else windows.padded(of) for of in (qk, v, log_decay, beta))
    return windows.packed(advance(packing, layer, *fed, **how))


def _whole(packing: SequencePacking, q, k, v, log_decay, beta) -> torch.Tensor:
    """Return the outputs of whole sequences, with gradients."""
    groups, packed_order = packing.groups
    found = []
    for count, length, gather, keep in groups:
        fed = [
            of
            if of is None
            else of.index_select(0, gather).unflatten(0, (count, length)).transpose(1, 2)
            for of in (q, k, v, log_decay, beta)
        ]
        state, outs = None, []
        for begin in range(0, length, CHUNK):
            part = slice(begin, min(begin + CHUNK, length))
            own = [of if of is None else of[:, :, part] for of in fed]
            out, d, sums = ops.window(state, *own)
            outs.append(out)
            if part.stop < length:
                state = ops.behind(state, own[1], d, sums)
        out = torch.cat(outs, 2).transpose(1, 2).flatten(0, 1)
        found.append(out.index_select(0, keep))
    return torch.cat(found).index_select(0, packed_order)


FUNCTIONS: dict[str, Callable] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _scan,
}
