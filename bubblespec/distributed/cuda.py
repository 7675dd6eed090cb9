"""Settings of torch and NCCL whose defaults do not suit a run on GPUs."""

import os

import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def set_cuda_defaults() -> None:
    """Change the defaults, except where the user has set an environment variable.

    Call before anything is on a GPU and before NCCL starts.
    """
    # Training leaves memory in pieces, and keys and values are large. A call instead of the
    # variable, as torch may read that while it is imported.
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    # Registration of the buffers of captured sums exchanges addresses between ranks during the
    # capture, and in some versions covers only the first piece of an expandable segment.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # A product of few rows, as in decoding, is split, and by default adds its parts in bfloat16: it
    # would round more coarsely than the same product in training.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
