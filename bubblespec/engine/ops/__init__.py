"""The operations of a decoder that attends to a cache: one file per kind of device.

Both files have the same functions. torch_ops.py is the reference, and computes on CPUs, in types
that triton_ops.py does not have, and in place of each kernel that a GPU cannot run (trial.py).
"""

import importlib.util
from functools import cache
from types import ModuleType, SimpleNamespace

import torch

DEVICES = ("cuda",)  # of triton_ops
TYPES = (torch.bfloat16, torch.float16)
# What torch can compute in place of kernels. Without ATTEND it computes everything.
ATTEND, ADD_NORM, STORE, GATED = "attention", "norms", "rotation", "gated units"
SAMPLE, ROWS = "sampling", "rows on the device"
STATES = "layers with a state"
LAYERS, HEAD, MOVE = "layers of training", "the head of training", "gradients in float32"
OPERATIONS = (ATTEND, ADD_NORM, STORE, GATED, SAMPLE, ROWS, STATES, LAYERS, HEAD, MOVE)
FUNCTIONS = {
    ATTEND: ("attend",),
    ADD_NORM: ("add_norm",),
    STORE: ("rotation", "rope_store"),
    GATED: ("gated",),
    SAMPLE: ("best_and_sum",),
    STATES: ("gated_norm", "rates"),
}

replaced: dict[str, str] = {}
"""The operations of this process that torch computes in place of kernels, and why."""


def ops_for(device: torch.device, dtype: torch.dtype) -> ModuleType | SimpleNamespace:
    """Return the operations for tensors of this type on this device."""
    from bubblespec.engine.ops import torch_ops

    if not has_kernels(device, dtype):
        return torch_ops
    from bubblespec.engine.ops import triton_ops

    if not any(name in FUNCTIONS for name in replaced):
        return triton_ops
    mixed = SimpleNamespace(**vars(triton_ops))
    for name in replaced:
        for function in FUNCTIONS.get(name, ()):
            setattr(mixed, function, getattr(torch_ops, function))
    return mixed


def has_kernels(device: torch.device, dtype: torch.dtype, operation: str = ATTEND) -> bool:
    """Whether kernels compute an operation in this type on this device."""
    is_served = device.type in DEVICES and dtype in TYPES and has_triton()
    return is_served and not is_replaced(operation)


def is_replaced(operation: str) -> bool:
    """Whether torch computes an operation in place of kernels."""
    return not replaced.keys().isdisjoint((ATTEND, operation))


@cache
def has_triton() -> bool:
    """Whether the package triton is installed; it comes with torch's builds for CUDA."""
    return importlib.util.find_spec("triton") is not None
