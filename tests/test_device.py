"""Which device a rank gets, and what is printed where a GPU is of no use; drivers are stand-ins."""

import ctypes

import pytest
import torch

from bubblespec.distributed.device import cuda_of_driver, find_device
from bubblespec.errors import InputError


class Driver:
    """Stands in for libcuda.so.1. version: as cuDriverGetVersion gives it, 1000 * major + 10 *
    minor."""

    def __init__(self, version: int):
        self.version = version

    def cuDriverGetVersion(self, pointer) -> int:
        pointer._obj.value = self.version
        return 0


@pytest.fixture
def machine(monkeypatch):
    """machine(driver, build): a machine on which torch sees no GPU. driver: None or its version;
    build: the CUDA version that torch is built for, or None."""

    def make(driver: int | None, build: str | None) -> None:
        def load(name: str) -> Driver:
            if driver is None:
                raise OSError(f"{name}: cannot open shared object file")
            return Driver(driver)

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
def test_cuda_without_gpu_error_names_cause(machine, driver, build, says):
    machine(driver, build)
    with pytest.raises(InputError, match=r"^model\.device: cuda, but ") as refusal:
        find_device("cuda")
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("driver, build, says", CASES)
def test_auto_warns_once_about_unusable_driver(machine, monkeypatch, capsys, driver, build, says):
    machine(driver, build)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert find_device("auto") == torch.device("cpu")
    said = capsys.readouterr().err
    if driver:
        assert said.startswith("warning: running on the CPU: ") and said.count("\n") == 1
        assert says in said
    else:
        assert not said


def test_library_without_driver_functions_is_no_driver(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert cuda_of_driver() is None


def test_gpus_are_assigned_to_ranks_in_order(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr("bubblespec.distributed.device.set_cuda_defaults", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    fourth = torch.device("cuda", 3)
    assert [find_device(name) for name in ("auto", "cuda")] == current == [fourth, fourth]
    assert find_device("cpu") == torch.device("cpu") and len(current) == 2
