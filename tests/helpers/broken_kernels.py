"""Kernels that fail on a GPU that is not there: in triton's interpreter, by name."""

import torch
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from bubblespec.engine import ops

# What torch computes if this kernel cannot be used. Training launches the first ones, too.
KERNELS = {
    "_attend": ops.ATTEND,
    "_merge": ops.ATTEND,
    "_add_norm": ops.ADD_NORM,
    "_rope_store": ops.STORE,
    "_gated": ops.GATED,
    "_sample_blocks": ops.SAMPLE,
    "_sample_rows": ops.SAMPLE,
    "_stand": ops.ROWS,
    "_fill": ops.ROWS,
    "_sampled": ops.ROWS,
    "_accept": ops.ROWS,
    "_plan": ops.STATES,
    "_convolve": ops.STATES,
    "_advance": ops.STATES,
    "_gated_norm": ops.STATES,
    "_rates": ops.STATES,
    "_add_norm_backward": ops.LAYERS,
    "_rotate": ops.LAYERS,
    "_gated_backward": ops.LAYERS,
    "_head_values": ops.HEAD,
    "_head_gradient": ops.HEAD,
    "_moved": ops.MOVE,
}
NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
NO_HEADER = RuntimeError("Command '['/usr/bin/gcc', 'main.c']' returned non-zero exit status 1.")


def fail(monkeypatch, kernel: str | None, error: Exception, times=lambda: True) -> None:
    """Let launches of a kernel, or of every one, raise an error."""
    launch = GridExecutor.__call__

    def launched(executor, *args, **kwargs):
        if kernel in (None, executor.fn.__name__) and times():
            raise error
        return launch(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launched)


def spoil(monkeypatch, kernel: str) -> None:
    """Let a kernel write other numbers than it does: by a half more, or integers by one."""
    launch = GridExecutor.__call__

    def launched(executor, *args, **kwargs):
        if executor.fn.__name__ != kernel:
            return launch(executor, *args, **kwargs)
        given = [of for of in tree_leaves((args, kwargs)) if isinstance(of, torch.Tensor)]
        before = [of.clone() for of in given]
        result = launch(executor, *args, **kwargs)
        for of, old in zip(given, before, strict=True):
            changed = (of != old) & ~(of.isnan() & old.isnan())
            more = of * 1.5 if of.is_floating_point() else of + 1
            of.copy_(torch.where(changed, more, of))
        return result

    monkeypatch.setattr(GridExecutor, "__call__", launched)
