"""The engine of a GPU on a CPU: operations in triton's interpreter, and graphs that are calls."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bubblespec.engine import graphs, ops

POOL = ("the pool",)

aten = torch.ops.aten


class NoWaits(TorchDispatchMode):
    """Context that raises where the host would have to wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (aten.item.default, aten.is_nonzero.default, aten.nonzero.default):
            raise RuntimeError("called a synchronizing CUDA operation")
        return function(*args, **(kwargs or {}))


def rehearse(run) -> None:
    with NoWaits():
        run()


def fail_at(monkeypatch, stage: str, times: list[int], applies=lambda: True) -> list[int]:
    """Let memory run out in some calls of `graphs.rehearse` or `graphs.capture`. Returns a list of
    all calls, which count from 0 where `applies()`."""
    original, calls = getattr(graphs, stage), []

    def short_of_memory(*arguments):
        if applies():
            calls.append(len(calls))
            if calls[-1] in times:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return original(*arguments)

    monkeypatch.setattr(graphs, stage, short_of_memory)
    return calls


class Captures:
    """Stand-in for `graphs.capture` that counts graphs and replays."""

    def __init__(self):
        self.pools, self.num_replays = [], 0

    def __call__(self, run, pool):
        self.pools.append(pool)
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay, POOL


def stand_in(monkeypatch) -> Captures:
    """Let float32 models on this CPU take the path of a GPU."""
    captures = Captures()
    monkeypatch.setattr(ops, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(ops, "TYPES", (torch.float32, *ops.TYPES))
    monkeypatch.setattr(graphs, "rehearse", rehearse)
    monkeypatch.setattr(graphs, "capture", captures)
    return captures
