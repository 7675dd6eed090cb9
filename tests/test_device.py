"""The device of a rank, what is printed where a GPU cannot be used (drivers are stand-ins), and the
settings for GPUs."""

import contextlib
import ctypes
import os

import pytest
import torch

from bubblespec.distributed.ranks import (
    ALLOCATOR_VARIABLES,
    find_device,
    ranks_from_environment,
    set_cuda_defaults,
)
from tests.helpers.checks import refusal


class Driver:
    """Stands in for libcuda.so.1. version: as cuDriverGetVersion gives it."""

    def __init__(self, version: int):
        self.version = version

    def cuDriverGetVersion(self, pointer) -> int:
        pointer._obj.value = self.version
        return 0


@pytest.fixture
def machine(monkeypatch):
    """A machine on which torch sees no GPU. driver: its version, None without one, -1 for a library
    without its functions; build: CUDA version that torch is built for, or None."""

    def make(driver: int | None, build: str | None) -> None:
        def load(name: str) -> Driver:
            if driver is None:
                raise OSError(f"{name}: cannot open shared object file")
            return object() if driver < 0 else Driver(driver)

        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch, "__version__", "2.13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    return make


CASES = [
    (None, None, "torch 2.13.0 is built without CUDA; install a build with CUDA"),
    (13000, None, "torch 2.13.0 is built without CUDA; install a build with CUDA"),
    (None, "13.0", "there is no NVIDIA driver (libcuda.so.1); install it, in Docker run with"),
    (-1, "13.0", "there is no NVIDIA driver (libcuda.so.1); install it, in Docker run with"),
    (0, "13.0", "there is no NVIDIA driver (libcuda.so.1); install it, in Docker run with"),
    (
        12020,
        "13.0",
        "the NVIDIA driver is too old: it supports CUDA up to 12.2; torch 2.13.0 is built for "
        "13.0; install driver 580 or newer, or a build of torch for CUDA 12",
    ),
    (11080, "12.8", "built for 12.8; install driver 525 or newer, or a build of torch for CUDA 11"),
    (13010, "14.0", "built for 14.0; install a newer driver, or a build of torch for CUDA 13"),
    (12000, "12.8", "torch finds no GPU; check nvidia-smi and CUDA_VISIBLE_DEV"),
    (13000, "12.8", "torch finds no GPU; check nvidia-smi and CUDA_VISIBLE_DEV"),
]


@pytest.mark.parametrize("driver, build, says", CASES)
def test_unusable_gpu_is_error_or_one_warning(machine, monkeypatch, capsys, driver, build, says):
    machine(driver, build)
    message = refusal(find_device, "cuda")
    assert message.startswith("model.device: cuda, but ") and says in message
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find_device("auto") == torch.device("cpu")
    said = capsys.readouterr().err
    assert bool(said) == ((driver or 0) > 0)
    if said:
        assert said.startswith("warning: running on the CPU: ") and said.count("\n") == 1
        assert says in said


def test_gpus_are_assigned_to_ranks_in_order(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr("bubblespec.distributed.ranks.set_cuda_defaults", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    fourth = torch.device("cuda", 3)
    assert [find_device(name) for name in ("auto", "cuda")] == current == [fourth, fourth]
    assert find_device("cpu") == torch.device("cpu") and len(current) == 2


# Settings


settings = torch._C._accelerator_getAllocatorSettings
matmul = torch.backends.cuda.matmul


@pytest.fixture
def own_defaults(monkeypatch):
    for name in (*ALLOCATOR_VARIABLES, "NCCL_GRAPH_REGISTER"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = True
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    yield
    matmul.allow_bf16_reduced_precision_reduction = before
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.usefixtures("own_defaults")
def test_defaults_without_variables():
    set_cuda_defaults()
    assert settings() == "expandable_segments:True"
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    assert matmul.allow_bf16_reduced_precision_reduction is False


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
@pytest.mark.usefixtures("own_defaults")
@pytest.mark.parametrize("value", ["max_split_size_mb:512", ""])
def test_user_variables_take_precedence(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    set_cuda_defaults()
    assert settings() == "expandable_segments:False"
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"


@pytest.mark.usefixtures("own_defaults")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_defaults_are_set_before_first_call_on_gpu(monkeypatch, device):
    def set_device(device):
        raise ZeroDivisionError  # instead of the first call that needs a GPU

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    expected = pytest.raises(ZeroDivisionError) if device == "cuda" else contextlib.nullcontext()
    with expected, ranks_from_environment(device, 1.0):
        pass
    is_set = device == "cuda"
    assert settings() == f"expandable_segments:{is_set}"
    assert ("NCCL_GRAPH_REGISTER" in os.environ) == is_set
    assert matmul.allow_bf16_reduced_precision_reduction != is_set
