"""transformers' modules with a state over packed tokens.

Gated delta layers and short convolutions compute what is written out in state_layers.py. Modules of
Mamba-2 pass their keyword arguments on to two functions of the file that they are in, a causal
convolution and a scan: these are replaced by functions that know the packing. Without a packing all
of them compute what they did.

Shape legend: N packed tokens, H heads, G key heads, K and V width of keys and values, C channels.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from bubblespec.engine.ops import STATES, has_kernels
from bubblespec.engine.state_layers import (
    GatedDelta,
    ShortConvolution,
    convolution,
    recurrence,
)
from bubblespec.engine.states import WINDOWS
from bubblespec.engine.weights import one_by_one

NUMBER = "state_layer"  # keyword argument: the number of a layer
# Names, in families' modules, of the numbers of value and key heads, and of their sizes.
SIZES = (
    ("num_v_heads", "num_heads"),
    ("num_k_heads", "n_groups"),
    ("head_k_dim", "ssm_state_size"),
    ("head_v_dim", "head_dim"),
)
ORIGINAL = "_bubblespec_original"  # attribute of a function


def serve_states(model: PreTrainedModel) -> list[int]:
    """Let a model's layers with a state compute packed tokens; return their numbers.

    There are none where a layer is of another kind."""
    numbers = []
    separate = lambda kind, layers: one_by_one(layers)  # noqa: E731
    for module in _with_state(model):
        home = sys.modules[type(module).__module__]
        own: Any = None
        try:
            if hasattr(home, "torch_chunk_gated_delta_rule"):
                own = GatedDelta(module, separate)
            elif not hasattr(module, "A_log"):
                own = ShortConvolution(module, separate)
        except AttributeError:
            return []
        if own is None and not hasattr(home, "mamba2_chunk_scan"):
            return []
        numbers.append(module.layer_idx)
        original = MethodType(type(module).forward, module)  # a copied model has the other one's
        if own is not None:
            module.forward = functools.partial(_forward, original, own)
            continue
        for name, compute in FUNCTIONS.items():
            if not hasattr(function := getattr(home, name), ORIGINAL):
                setattr(home, name, _replacing(function, compute))
        module.forward = functools.partial(original, **{NUMBER: module.layer_idx})
    if numbers:  # transformers advises packages in place of functions that are hardly used here
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
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


def state_numbers(model: PreTrainedModel) -> int:
    """Return how many numbers the states of one row have, those of convolutions left out."""
    return sum(of.heads * of.key * of.value for of in state_shapes(model))


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


def _forward(
    original: Callable, own: Callable, hidden_states: torch.Tensor, packing: Any = None, **kwargs
) -> torch.Tensor:
    if packing is None:
        return original(hidden_states=hidden_states, **kwargs)
    return own(hidden_states[0], packing)[None]


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
    out = convolution(packing, state_layer, x, weight, bias, has_silu)
    return (out if has_silu or activation is None else ACT2FN[activation](out)).t()[None]


def _scan(
    packing, hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, dt_softplus=False,
    dt_limit=(0.0, float("inf")), return_final_states=False, *, state_layer, **kwargs,
) -> torch.Tensor | tuple[torch.Tensor, None]:  # fmt: skip
    """Return [1, N, H, V] of hidden states [1, N, H, V], B and C [1, N, G, K], dt [1, N, H]."""
    dt = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    x, k, q, dt = (_wide(of) for of in (hidden_states[0], B[0], C[0], dt))
    qk, decay = torch.stack((q, k), 1), A.to(x.dtype) * dt
    out = recurrence(packing, state_layer, qk, x * dt.unsqueeze(-1), decay.unsqueeze(1))
    if D is not None:
        out = out + D.unsqueeze(-1) * x
    return (out[None], None) if return_final_states else out[None]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


FUNCTIONS: dict[str, Callable] = {"causal_conv1d_fn": _convolution, "mamba2_chunk_scan": _scan}
