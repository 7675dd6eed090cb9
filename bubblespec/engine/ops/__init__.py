"""The operations of a decoder that attends to a cache: one file per kind of device.

Both files have the same functions. torch_ops.py is the reference, and computes on CPUs and in types
that triton_ops.py does not have.
"""

import importlib.util
from functools import cache
from types import ModuleType

import torch

DEVICES = ("cuda",)  # of triton_ops
TYPES = (torch.bfloat16, torch.float16)


def ops_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the operations for tensors of this type on this device."""
    if has_kernels(device, dtype):
        from bubblespec.engine.ops import triton_ops

        return triton_ops
    from bubblespec.engine.ops import torch_ops

    return torch_ops


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether triton_ops.py computes this type on this device."""
    return device.type in DEVICES and dtype in TYPES and has_triton()


@cache
def has_triton() -> bool:
    """Whether the package triton is installed; it comes with torch's builds for CUDA."""
    return importlib.util.find_spec("triton") is not None
