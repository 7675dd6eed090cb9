"""The device of a rank, settings for GPUs, and why a GPU that is there cannot be used."""

import ctypes
import os

import torch

from bubblespec.errors import InputError, log

# NVIDIA's CUDA Compatibility, minor version compatibility: the oldest driver of each major version
OLDEST_DRIVER = {12: 525, 13: 580}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def find_device(device: str) -> torch.device:
    """Return the device of this rank for `model.device`; make a GPU the current one.

    Raises InputError if a GPU is requested and cannot be used, or for more ranks than GPUs.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if device == "cuda":
            raise InputError(f"model.device: cuda, but {why_no_gpu()}; or set cpu")
        if local_rank == 0 and cuda_of_driver() is not None:
            log(f"warning: running on the CPU: {why_no_gpu()}")
        return torch.device("cpu")
    if max(local_rank + 1, local_world_size) > torch.cuda.device_count():
        raise InputError(
            f"--nproc_per_node: {local_world_size} ranks, but only {torch.cuda.device_count()} "
            "GPUs; each rank needs its own"
        )
    set_cuda_defaults()
    target = torch.device("cuda", local_rank)
    torch.cuda.set_device(target)
    return target


def why_no_gpu() -> str:
    """Return what keeps torch from using a GPU, and what to install or set."""
    driver, build = cuda_of_driver(), torch.version.cuda
    if build is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with CUDA"
    if driver is None:
        return "there is no NVIDIA driver (libcuda.so.1); install it, in Docker run with --gpus all"
    major = int(build.split(".")[0])
    if driver[0] < major:
        oldest = OLDEST_DRIVER.get(major)
        needed = f"driver {oldest} or newer" if oldest else "a newer driver"
        return (
            f"the NVIDIA driver is too old: it supports CUDA up to {driver[0]}.{driver[1]}; torch "
            f"{torch.__version__} is built for {build}; install {needed}, or a build of torch for "
            f"CUDA {driver[0]}"
        )
    advice = "check nvidia-smi and CUDA_VISIBLE_DEVICES, in Docker run with --gpus all"
    return f"torch finds no GPU; {advice}"


def cuda_of_driver() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver runs; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # none, or something else of that name
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def set_cuda_defaults() -> None:
    """Change defaults of torch and NCCL, except where the user has set an environment variable.

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
