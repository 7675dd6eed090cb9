"""Captures that fail on a stand-in for CUDA: what torch, graphs and ranks are left with."""

import contextlib
import threading
from collections import Counter
from functools import partial
from itertools import pairwise
from weakref import WeakSet

import numpy as np
import pytest
import torch

from bubblespec.engine import graphs
from bubblespec.engine.graphs import GraphPool
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.errors import CAPTURE_HAS_FAILED, first_cause, is_out_of_memory
from tests.helpers.documented import says
from tests.helpers.tp import ThreadTPGroup, run_together

MAIN, SIDE = "the stream of everything else", "the stream of captures"
NO_MEMORY = "CUDA out of memory. Tried to allocate 2 GiB"
INVALID = f"CUDA error: operation failed due to a {CAPTURE_HAS_FAILED}"
WARNING = "warning: forwards are eager, not CUDA graphs: "


class Cuda(threading.local):
    """What torch 2.11 keeps of captures, for each thread: streams, pools, the generator.

    CUDA ends an invalidated capture with an error, behind which torch has given nothing back."""

    def __init__(self):
        self.stream, self.sync_mode = MAIN, "default"
        self.capturing: Graph | None = None
        self.is_valid = self.refuses_to_draw = False
        self.uses, self.underway, self.num_pools = Counter(), [], 0

    def is_clean(self) -> bool:
        """Whether nothing is left of any capture."""
        is_idle = self.capturing is None and not self.underway and not self.refuses_to_draw
        return is_idle and not +self.uses and (self.stream, self.sync_mode) == (MAIN, "default")

    def handle(self) -> tuple[int, int]:
        self.num_pools += 1
        return 0, self.num_pools

    def end_pool(self, device: int, pool: tuple) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release_pool(self, device: int, pool: tuple) -> None:
        self.uses[pool] -= 1
        assert self.uses[pool] >= 0


class Graph:
    """Stand-in for `torch.cuda.CUDAGraph`, of the thread that makes it."""

    def __init__(self, cuda: Cuda):
        self.cuda, self.own_pool, self.has_ended = cuda, None, False

    def pool(self):
        assert self.has_ended
        return self.own_pool

    def capture_begin(self, pool, capture_error_mode):
        cuda = self.cuda
        assert cuda.stream == SIDE and cuda.capturing is None and pool not in cuda.underway
        cuda.refuses_to_draw = True
        cuda.underway.append(pool)
        cuda.uses[pool] += 1
        self.own_pool, cuda.capturing, cuda.is_valid = pool, self, True

    def capture_end(self):
        cuda = self.cuda
        assert cuda.stream == SIDE, "on the stream that it began on"
        if cuda.capturing is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        cuda.capturing = None
        if not cuda.is_valid:
            raise RuntimeError(INVALID)
        cuda.end_pool(0, self.own_pool)
        self.has_ended, cuda.refuses_to_draw = True, False

    def reset(self):
        if self.has_ended:
            self.has_ended = False
            self.cuda.release_pool(0, self.own_pool)

    def replay(self):
        assert self.has_ended and self.cuda.stream == MAIN

    def __del__(self):
        self.reset()


class Generator:
    """Stand-in for the default generator: a copy of its state is in no capture."""

    def __init__(self, cuda: Cuda):
        self.cuda = cuda

    def clone_state(self):
        return "a copy"

    def graphsafe_set_state(self, state):
        assert state == "a copy" and self.cuda.capturing is None
        self.cuda.refuses_to_draw = False


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda()
    of_torch = {
        "CUDAGraph": lambda: Graph(cuda),
        "Stream": lambda: SIDE,
        "current_stream": lambda: cuda.stream,
        "set_stream": partial(setattr, cuda, "stream"),
        "current_device": lambda: 0,
        "default_generators": (Generator(cuda),),
        "graph_pool_handle": cuda.handle,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_sync_debug_mode": lambda: cuda.sync_mode,
        "set_sync_debug_mode": partial(setattr, cuda, "sync_mode"),
    }
    for name, value in of_torch.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_pool)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", cuda.release_pool)
    graphs._capture_stream.cache_clear()
    yield cuda
    graphs._capture_stream.cache_clear()


def out_of_memory(cuda: Cuda) -> None:
    cuda.is_valid = False
    raise torch.OutOfMemoryError(NO_MEMORY)


def handled(cuda: Cuda) -> None:
    """Run out of memory, and raise from a call that tidies up."""
    try:
        out_of_memory(cuda)
    finally:
        raise RuntimeError(INVALID)


def refused(cuda: Cuda) -> None:
    """Raise an error that leaves the capture valid."""
    raise ValueError("the layer refuses")


def noticed_late(cuda: Cuda) -> None:
    """Invalidate the capture, which shows at its end."""
    cuda.is_valid = False


class Forward:
    """A forward of one layer that computes nothing, for graphs; the last rank may fail."""

    min_tokens, queries_per_kv, is_invariant, decoder = 1, 1, False, None

    def __init__(self, cuda: Cuda, tp: ThreadTPGroup | None = None):
        self.cuda, self.memory, self.rank = cuda, WeakSet(), 0 if tp is None else tp.rank
        self.gather_text = (lambda text: [text]) if tp is None else tp.gather_text
        self.num_calls = {"rehearse": 0, "capture": 0}
        self.faults: dict[tuple[str, int], object] = {}  # by stage and call

    def weight(self) -> torch.Tensor:
        return torch.zeros(1)

    def hidden(self, ids: torch.Tensor, packing) -> torch.Tensor:
        stage = "rehearse" if self.cuda.capturing is None else "capture"
        number, self.num_calls[stage] = self.num_calls[stage], self.num_calls[stage] + 1
        if (fault := self.faults.get((stage, number))) is not None:
            fault(self.cuda)
        return ids.float()[:, None]

    def rehearsal(self, num_tokens) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def connect(self) -> None:
        pass


def make_graphs(forward: Forward) -> tuple[GraphPool, KVCache]:
    cache = KVCache(8, 64)
    made = GraphPool(forward, cache, 64)
    assert len(made.shapes) > 10
    return made, cache


def pools_of(made: GraphPool) -> set[tuple]:
    return {graph.pool() for graph in made.of.memory}


def replay(made: GraphPool, cache: KVCache) -> bool:
    """Whether a forward of two tokens has a graph."""
    packing = pack_rows(cache, np.zeros(8, int), np.array([2] + [0] * 7), torch.device("cpu"))
    has_graphs = made.are_ready()
    if has_graphs:
        made.hidden(np.array([4, 5]), packing)
    return has_graphs


def test_captures_that_succeed_share_a_pool(cuda):
    made, cache = make_graphs(Forward(cuda))
    assert replay(made, cache) and cuda.stream == MAIN and not cuda.refuses_to_draw
    assert +cuda.uses == {(0, 1): len(made.shapes)} and pools_of(made) == {(0, 1)}
    made.clear()
    assert cuda.is_clean()


@pytest.mark.parametrize("number", [0, 9])
@pytest.mark.parametrize(
    "fault, cause",
    [(refused, "ValueError: the layer refuses"), (noticed_late, f"RuntimeError: {INVALID}")],
)
def test_failed_capture_leaves_torch_as_it_was(cuda, capsys, number, fault, cause):
    made, cache = make_graphs(forward := Forward(cuda))
    forward.faults["capture", number] = fault
    for _ in range(2):
        assert not replay(made, cache) and cuda.is_clean()
        assert f"graphs: {cause} (" in made.problem and not made.graphs
        assert forward.num_calls["capture"] == number + 1, "there is no second attempt"
        made.clear()
    printed = capsys.readouterr().err
    assert printed.startswith(f"{WARNING}{cause}")
    assert says("a capture, at any size", printed.splitlines()[0])


@pytest.mark.parametrize("number", [0, 9])
@pytest.mark.parametrize("fault", [out_of_memory, handled])
@pytest.mark.parametrize("num_faults", [1, 2])
def test_capture_without_memory_is_tried_again(cuda, capsys, number, fault, num_faults):
    """With one fault the second attempt has graphs; with two the next rollout has."""
    made, cache = make_graphs(forward := Forward(cuda))
    for attempt in range(num_faults):
        forward.faults["capture", (number + 1) * (attempt + 1) - 1] = fault
    assert replay(made, cache) == (num_faults == 1)
    printed = capsys.readouterr().err
    if num_faults == 2:
        assert cuda.is_clean() and printed.startswith(f"{WARNING}OutOfMemoryError: {NO_MEMORY}")
        made.clear()
        for call in range(2):
            forward.faults["capture", forward.num_calls["capture"] + call] = fault
        assert not replay(made, cache) and not capsys.readouterr().err, "said once"
        made.clear()
        assert replay(made, cache)
    else:
        assert not printed
    assert (+cuda.uses).total() == len(made.shapes) and pools_of(made) == set(+cuda.uses)
    failed = (number + 1) * num_faults + 2 * (num_faults == 2)
    assert forward.num_calls["capture"] == failed + len(made.shapes)
    made.clear()
    assert cuda.is_clean()


@pytest.mark.parametrize("fault, attempts", [(refused, 1), (out_of_memory, 2)])
def test_failed_rehearsal_leaves_torch_as_it_was(cuda, capsys, fault, attempts):
    made, cache = make_graphs(forward := Forward(cuda))
    for attempt in range(attempts):
        forward.faults["rehearse", 10 * (attempt + 1) - 1] = fault
    assert not replay(made, cache) and cuda.is_clean()
    assert forward.num_calls == {"rehearse": 10 * attempts, "capture": 0}
    assert capsys.readouterr().err.startswith(WARNING)


@pytest.mark.parametrize(
    "stage, number, fault, num_faults, cause",
    [
        ("rehearse", 3, refused, 1, "the layer refuses"),
        ("capture", 0, noticed_late, 1, INVALID),
        ("capture", 9, refused, 1, "the layer refuses"),
        ("capture", 9, handled, 2, NO_MEMORY),
        ("capture", 9, handled, 1, None),
    ],
)
def test_ranks_agree_on_a_failed_capture(cuda, capsys, stage, number, fault, num_faults, cause):
    """The rank that fails tries again alone, and no rank has graphs if it fails again."""

    def of_rank(tp: ThreadTPGroup):
        made, cache = make_graphs(forward := Forward(cuda, tp))
        if tp.rank == 1:
            for attempt in range(num_faults):
                forward.faults[stage, (number + 1) * (attempt + 1) - 1] = fault
        has_graphs = replay(made, cache)
        assert has_graphs == (cause is None) and (has_graphs or cuda.is_clean())
        made.clear()
        assert cuda.is_clean()
        return made.problem if cause != NO_MEMORY else made.num_replays

    found = run_together(2, of_rank)
    assert found[0] == found[1]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (cause is not None) and all(cause in line for line in lines)


def raised(*errors: BaseException) -> BaseException:
    """Return the last of several errors, each raised while the one before was handled."""
    copies = [type(error)(*error.args) for error in errors]
    for before, after in pairwise(copies):
        after.__context__ = before
    return copies[-1]


def test_first_cause_names_memory_and_what_a_capture_hides():
    memory, capture = torch.OutOfMemoryError(NO_MEMORY), RuntimeError(INVALID)
    other, last = KeyError("flash_attn"), TypeError("no such call")
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    for chain, cause in [
        ((last,), last),
        ((other, last), last),
        ((other, capture), other),
        ((memory, capture), memory),
        ((memory, other, last), memory),
        ((other, cublas, capture), cublas),
        ((capture,), capture),
    ]:
        found = raised(*chain)
        assert repr(first_cause(found)) == repr(cause)
        assert is_out_of_memory(found) == (cause in (memory, cublas))
    by_hand = RuntimeError("failed")
    by_hand.__cause__, memory.__context__ = memory, by_hand  # a circle
    assert first_cause(by_hand) is memory
    assert is_out_of_memory(f"rank 1: {NO_MEMORY}") and not is_out_of_memory("RuntimeError: size")
