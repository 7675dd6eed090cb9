"""The engine of a GPU on a CPU: operations in triton's interpreter, and graphs that are calls."""

import os
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bubblespec.engine import arrays, graphs, ops
from bubblespec.engine.graphs import GraphPool
from bubblespec.engine.step_graphs import StepGraphs

POOL = ("the pool",)
SIZES = (4, 16, 32)  # of graphs here

aten = torch.ops.aten
WAITS = (aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default)
WAITS += (aten.nonzero.default,)
ALLOCATE = ("aten::empty", "aten::new_empty")

needs_interpreter = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET"),
    pytest.mark.skipif(not ops.has_triton(), reason="needs triton"),
    pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered"),
]


class NoWaits(TorchDispatchMode):
    """Context that raises where the host would have to wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in WAITS:
            raise RuntimeError("called a synchronizing CUDA operation")
        return function(*args, **(kwargs or {}))


def rehearse(run) -> None:
    with NoWaits():
        run()


def fail_at(monkeypatch, times) -> None:
    """Let memory run out in some calls of `graphs.capture`, which count from 0."""
    original, calls = graphs.capture, []

    def short_of_memory(*arguments):
        calls.append(len(calls))
        if calls[-1] in times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return original(*arguments)

    monkeypatch.setattr(graphs, "capture", short_of_memory)


class Captures:
    """Stand-in for `graphs.capture`: a replay calls what was captured.

    It reads the memory that it was captured with. pools: what each capture found, or None."""

    def __init__(self):
        self.pools, self.num_replays = [], 0
        self._stage = threading.local()

    @property
    def stage(self) -> str | None:
        return getattr(self._stage, "name", None)

    def __call__(self, run, memory):
        of = run.func.__self__
        self.pools.append(POOL if memory else None)
        self._run(run, "capture")
        cache, addresses = (of.pool if isinstance(of, StepGraphs) else of).cache, memory_of(of)

        def replay() -> None:
            assert [a is b for a, b in zip(addresses, memory_of(of), strict=True)].count(False) == 0
            pages = cache.pages
            assert pages is None or cache._version == pages.version, "the table is old"
            self.num_replays += 1
            self._run(run, "replay")

        memory.add(replay)
        return replay

    def _run(self, run, stage: str) -> None:
        self._stage.name = stage
        try:
            run()
        finally:
            self._stage.name = None


def memory_of(of: GraphPool | StepGraphs) -> list[torch.Tensor | None]:
    """Return the tensors that a graph knows by their addresses, weights excepted."""
    pool = of.pool if isinstance(of, StepGraphs) else of
    rows = () if pool.fill is None else pool.fill.__self__._state or ()
    known = pool._inputs, pool.results, pool.states, pool.cache._table
    states = () if pool.cache.states is None else pool.cache.states.tensors
    return [*known, *pool.cache._tensors, *states, *rows]


class Launches(TorchDispatchMode):
    """Context that counts the kernels of a GPU: launches of Triton's, and torch's operations."""

    def __init__(self, monkeypatch):
        super().__init__()
        from triton.runtime.interpreter import GridExecutor

        self.names: list[str] = []
        self._is_inside = False
        launch = GridExecutor.__call__

        def counted(executor, *args, **kwargs):
            self.names.append(executor.fn.__name__)
            self._is_inside = True
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self._is_inside = False

        monkeypatch.setattr(GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if not (self._is_inside or function.is_view or name.startswith(ALLOCATE)):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class Traffic(TorchDispatchMode):
    """Context that counts copies to a GPU and waits for it, outside of graphs."""

    def __init__(self, monkeypatch, captures: Captures):
        super().__init__()
        self.captures, self.uploads, self.waits = captures, 0, 0
        self._on_host: dict[int, torch.Tensor] = {}
        from_numpy, cpu, wait = torch.from_numpy, torch.Tensor.cpu, arrays.wait

        def noted(array):
            tensor = from_numpy(array)
            self._on_host[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        def counted(tensor):
            self.waits += captures.stage is None
            return cpu(tensor)

        def waited(*of):
            self.waits += 1
            return wait(*of)

        monkeypatch.setattr(arrays, "wait", waited)
        monkeypatch.setattr(torch, "from_numpy", noted)
        monkeypatch.setattr(torch.Tensor, "cpu", counted)

    def clear(self) -> None:
        self.uploads = self.waits = 0
        self._on_host.clear()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.captures.stage is None:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            is_read = any(t.untyped_storage().data_ptr() in self._on_host for t in tensors)
            self.uploads += is_read and not function.is_view
            self.waits += function in WAITS
        return function(*args, **(kwargs or {}))


def stand_in(monkeypatch) -> Captures:
    """Let float32 models on this CPU take the path of a GPU, with graphs of few sizes."""
    from triton.runtime.interpreter import GridExecutor

    captures, lock, launch = Captures(), threading.Lock(), GridExecutor.__call__

    def alone(*args, **kwargs):  # the interpreter changes the language while it runs
        with lock:
            return launch(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", alone)
    monkeypatch.setattr(ops, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(ops, "TYPES", (torch.float32, *ops.TYPES))
    for name, value in {"SIZES": SIZES, "STEP": SIZES[-1], "GROWTH": 2}.items():
        monkeypatch.setattr(graphs, name, value)
    monkeypatch.setattr(graphs, "rehearse", rehearse)
    monkeypatch.setattr(graphs, "capture", captures)
    return captures
