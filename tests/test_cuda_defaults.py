"""Settings for GPUs: what is set, what the user's environment decides, and when."""

import os

import pytest
import torch

from bubblespec.distributed.cuda import ALLOCATOR_VARIABLES, set_cuda_defaults
from bubblespec.distributed.ranks import ranks_from_environment

settings = torch._C._accelerator_getAllocatorSettings
matmul = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def torchs_own_defaults(monkeypatch):
    for name in (*ALLOCATOR_VARIABLES, "NCCL_GRAPH_REGISTER"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = True
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    yield
    matmul.allow_bf16_reduced_precision_reduction = before
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_defaults_without_variables():
    set_cuda_defaults()
    assert settings() == "expandable_segments:True"
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    assert matmul.allow_bf16_reduced_precision_reduction is False


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize("value", ["max_split_size_mb:512", ""])
def test_user_variables_take_precedence(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    set_cuda_defaults()
    assert settings() == "expandable_segments:False"
    assert os.environ["NCCL_GRAPH_REGISTER"] == "1"


class FirstOnGpuError(Exception):
    """Instead of the first call that needs a GPU."""


def test_gpu_run_sets_defaults_before_first_call(monkeypatch):
    def set_device(device):
        raise FirstOnGpuError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(FirstOnGpuError), ranks_from_environment("cuda", 1.0):
        pass
    assert settings() == "expandable_segments:True" and "NCCL_GRAPH_REGISTER" in os.environ


def test_cpu_run_sets_no_defaults():
    with ranks_from_environment("cpu", 1.0):
        pass
    assert settings() == "expandable_segments:False" and "NCCL_GRAPH_REGISTER" not in os.environ
    assert matmul.allow_bf16_reduced_precision_reduction
