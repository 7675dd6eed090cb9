"""CUDA graphs of forwards: one launch in place of hundreds.

A graph replays the same kernels on the same addresses. So a forward is padded to a fixed number of
tokens, and what changes between forwards (token ids, places in the cache, lengths) is copied into
one tensor at a fixed address; the block table has a fixed address too. Padding follows the
real tokens, is in no sequence and writes a spare page, so the real tokens' results are those of the
unpadded forward, up to the rounding of matrix products of another height.

Attention launches a block for each sequence that a graph has room for, also for sequences without
tokens, and a block has a tile of tokens times query heads. A row that feeds more tokens than fit
into a tile is several sequences. Small tiles are for decoding and short drafts, large ones for
prompts and long drafts.

All graphs of forwards are captured at the first forward, before anything is timed, the largest
first; the others share its memory. Graphs contain the addresses of keys, values and weights:
weights must be changed in place (optimizers do, LoRA too), and `clear` must follow a release of the
cache. Graphs of whole steps: step_graphs.py.

A forward of several ranks has their sums in its graphs, and a sum waits for the same graph on the
other ranks. So all ranks have graphs, captured in the same order, or none has any. Neither of the
two stages of capturing exchanges anything (NCCL: distributed/ranks.py), and the ranks exchange the
outcome of each; so a rank whose memory runs out may repeat a stage alone. First every rank runs
each forward without its sums, where errors of one rank show. Then each records its graphs, without
computing a sum. In between the ranks sum zeros in every size, as NCCL connects them at a size's
first use.

Shape legend: N tokens of a forward, B >= N tokens of a graph, S sequences that it has room for.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch

from bubblespec.engine.arrays import to_device
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import CachePacking, KVCache, pack_rows, pieces
from bubblespec.engine.ops.view import TILE, AttentionMetadata
from bubblespec.engine.states import Feed
from bubblespec.errors import (
    fallback,
    first_cause,
    first_problem,
    is_out_of_memory,
    log,
    one_line,
)

# Beyond 8 no step is larger than a third: below about 250 tokens reading the weights takes longer
# than computing with them, so padding costs next to nothing.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
GROWTH, STEP = 4 / 3, 64  # of larger sizes
TILES = (16, TILE)  # tokens times query heads of a block
FIELDS = 5  # of a forward's inputs, see `padded`
ALIGNMENT = 16  # numbers


class Shape(NamedTuple):
    """Size of a graph: tokens, padding included; sequences; and new tokens of a sequence."""

    tokens: int
    sequences: int
    max_q: int


@dataclass
class PaddedPacking:
    """The part of a `CachePacking` that operations read, on the device."""

    cache: KVCache
    view: AttentionMetadata

    @property
    def place(self) -> torch.Tensor:
        return self.view.place.long()  # torch's writes take nothing else

    @property
    def position(self) -> torch.Tensor:
        return self.view.position

    @property
    def page_offset(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.locate(self.place)

    @cached_property
    def windows(self) -> Feed:
        """See `CachePacking`."""
        assert self.cache.states is not None
        return self.cache.states.feed(self.view, self.cache.spare)


class GraphPool:
    """Captured forwards of one model over one cache, and captured callables behind them.

    This is the CUDA-graph pool of TLT ("Taming the long tail", arXiv 2511.16665), which captures
    in advance what policy and draft models may need. Its graphs share a memory, also with those of
    other forwards with the same `ModelForward.memory`; a few sizes, to which forwards are padded;
    and the clean-up of captures that fail: all graphs of a pool are captured, or none.

    The host sends what a forward reads, or `fill` writes it on the device. The cache needs a spare
    page. Ranks that compute together call `hidden`, with the same packing, and `clear` alike."""

    def __init__(
        self,
        forward: ModelForward,
        cache: KVCache,
        max_num_batched_tokens: int,
        state_size: int = 0,
        fill: Callable[[torch.Tensor, AttentionMetadata], object] | None = None,
    ):
        """state_size: width of a second input of `forward.hidden`, one vector a token, or 0.

        fill: queues what writes token ids [B] and a view of B tokens, in front of a forward."""
        self.of: Any = forward  # one with states has a second input
        self.cache, self.state_size, self.fill = cache, state_size, fill
        sizes = max_num_batched_tokens, cache.num_slots, forward.min_tokens, forward.queries_per_kv
        # Tiles of another size round differently.
        self.shapes = graph_shapes(*sizes, TILES[-1:] if forward.is_invariant else TILES)
        """Sizes, largest first."""
        self.sizes = sorted({shape.tokens for shape in self.shapes})
        self.graphs: dict[Any, Callable[[], None]] = {}
        """Replays: of forwards by their shapes, of others by the keys given to `capture`."""
        self.states: torch.Tensor | None = None
        """Second input at a fixed address, [B of the largest, state_size]."""
        self.results: torch.Tensor | None = None
        """Hidden states of all forwards at a fixed address, [B of the largest, C]."""
        self._inputs: torch.Tensor | None = None  # int32, see `padded`
        self.num_replays = 0
        self.problem: str | None = None
        """One line that says why there are no graphs, for a reason here or on another rank."""
        self._has_warned = False

    def hidden(
        self, tokens: np.ndarray | torch.Tensor, packing: CachePacking, *states: torch.Tensor
    ) -> torch.Tensor:
        """Return the last hidden states [N or more, hidden] of packed tokens int64 [N].

        They are valid until the next forward, which is eager if no graph fits. tokens: on the host
        or the device; states: [N, state_size], the second input, if it has one."""
        shape = self.shape_of(packing.count)
        if shape is None or not self.are_ready():
            if isinstance(tokens, np.ndarray):
                tokens = to_device(tokens, packing.device)
            return self.of.hidden(tokens, packing, *states)
        if isinstance(tokens, np.ndarray):
            self._send(tokens, packing, shape)
        else:
            self._send(np.zeros(len(tokens), np.int64), packing, shape)
            self._read(shape)[0][: len(tokens)] = tokens
        if self.states is not None:
            self.states[: len(tokens)] = states[0]
        return self.replay(shape)

    def are_ready(self) -> bool:
        """Whether there are graphs, which are captured if this is the first call."""
        if not self.graphs and not self.problem:
            self.capture({shape: partial(self._run, shape) for shape in self.shapes}, self._empty)
        return not self.problem

    def replay(self, shape: Shape) -> torch.Tensor:
        """Return the hidden states [B, hidden] of the inputs as they are."""
        assert self.results is not None
        self.cache.block_table(self.results.device)  # is up to date
        self.graphs[shape]()
        self.num_replays += 1
        return self.results[: shape.tokens]

    def shape_of(self, count: np.ndarray) -> Shape | None:
        """Return the smallest shape that fits rows of so many tokens, int64 [R].

        It has small tiles if no row takes more than one."""
        tokens, widest = int(count.sum()), int(count.max())
        for shape in reversed(self.shapes):
            if shape.tokens < tokens:
                continue
            fits = widest <= shape.max_q or shape.max_q == self.shapes[0].max_q
            if fits and int((-(-count // shape.max_q)).sum()) <= shape.sequences:
                return shape
        return None

    def capture(
        self,
        runs: dict[Any, Callable[[], object]],
        prepare: Callable[[Any], object] = lambda key: None,
    ) -> None:
        """Capture callables, in this order, as `graphs`: on all ranks or, with a problem, none.

        prepare: is called with a callable's key before it runs."""

        def rehearse_all() -> None:
            with self.of.rehearsal(self.sizes):
                for key, run in runs.items():
                    prepare(key)
                    rehearse(run)

        def record_all() -> None:
            for key, run in runs.items():
                prepare(key)
                self.graphs[key] = capture(run, self.of.memory)

        self.cache.block_table(self.of.weight().device)  # is up to date: no graph has its copy
        if self._on_all(rehearse_all, runs):
            self.of.connect()
            self._on_all(record_all, runs)

    def clear(self) -> None:
        """Give graphs and their memory back; the next forward captures them again."""
        self._forget(list(self.graphs))
        self.states = self.results = self._inputs = None
        if self.problem and is_out_of_memory(self.problem):
            self.problem = None

    def _forget(self, keys: Iterable) -> None:
        """Give graphs' memory back, once no replay uses it."""
        if self.graphs and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        for key in keys:
            self.graphs.pop(key, None)

    def _on_all(self, stage: Callable[[], None], keys: Iterable) -> bool:
        """Whether all ranks have completed a stage that exchanges nothing; else all give up.

        Where memory runs out, the allocator's unused memory and that of the graphs to capture are
        given back for a second attempt."""

        def with_free_memory() -> None:
            self._forget(keys)
            torch.cuda.empty_cache()
            stage()

        problem = attempt(stage)
        if problem and is_out_of_memory(problem):
            problem = attempt(with_free_memory)
        problem = first_problem(problem, self.of.gather_text)
        if problem is None:
            return True
        self.clear()
        key = "rollout.enforce_eager=true"
        self.problem = fallback("forwards are eager, not CUDA graphs", problem, key)
        if self.of.rank == 0 and not self._has_warned:  # memory may run out at every step
            self._has_warned = True
            log(f"warning: {self.problem}")
        return False

    def _empty(self, shape: Shape) -> None:
        """Let all tokens of a forward be padding; makes its inputs at the first call."""
        device = self.of.weight().device
        if self._inputs is None:
            if self.state_size:
                self.states = self.of.weight().new_zeros(self.shapes[0].tokens, self.state_size)
            decoder = self.of.decoder
            if decoder is not None and decoder.rotary_emb is not None:  # some ask the device
                decoder.tables(self.cache.slot_length)
            size = FIELDS * _width(self.shapes[0])  # last, as memory may run out before
            self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        nothing = np.zeros(1, np.int64)
        self._send(nothing[:0], pack_rows(self.cache, nothing, nothing, device), shape)

    def _send(self, tokens: np.ndarray, packing: CachePacking, shape: Shape) -> None:
        """Send a forward's inputs to the device."""
        assert self._inputs is not None
        inputs = np.zeros((FIELDS, _width(shape)), np.int32)
        padded(tokens, packing, shape, inputs)
        flat = torch.from_numpy(inputs.ravel())
        self._inputs[: len(flat)].copy_(flat, non_blocking=True)

    def _read(self, shape: Shape) -> tuple[torch.Tensor, AttentionMetadata]:
        """Return token ids and the view of a forward's inputs."""
        assert self._inputs is not None
        fields = self._inputs[: FIELDS * _width(shape)].view(FIELDS, -1)
        ids, place, position = fields[:3, : shape.tokens]
        first, slot = fields[3:, : shape.sequences + 1]
        length, table = self.cache.slot_length, self.cache.block_table(ids.device)
        sizes = shape.max_q, length, self.cache.split_of(shape.tokens, length)
        return ids, AttentionMetadata(place, position, first, slot[:-1], table, *sizes)

    def _run(self, shape: Shape) -> None:
        ids, view = self._read(shape)
        if self.fill is not None:
            self.fill(ids, view)
        second = () if self.states is None else (self.states[: shape.tokens],)
        found = self.of.hidden(ids, PaddedPacking(self.cache, view), *second)
        if self.results is None:  # in the rehearsal of the largest
            self.results = torch.empty_like(found)
        self.results[: shape.tokens] = found


def _width(shape: Shape) -> int:
    """Return the numbers of a field of inputs: all fields are aligned, for kernels of one kind."""
    return -(-(shape.tokens + 1) // ALIGNMENT) * ALIGNMENT


def attempt(stage: Callable[[], None]) -> str | None:
    """Run a stage; return one line about its failure, or None. The error's tensors are freed."""
    try:
        stage()
    except Exception as error:  # the model's own code runs here, and drivers
        return one_line(first_cause(error))
    return None


def tokens_of(tile: int, queries_per_kv: int) -> int:
    """Return how many tokens of a sequence a tile holds, each of `queries_per_kv` query heads."""
    return max(tile // queries_per_kv, 1)


def graph_sizes(max_num_batched_tokens: int, min_tokens: int = 1) -> list[int]:
    """Return the tokens of graphs, ascending."""
    largest, size = max(max_num_batched_tokens, min_tokens), SIZES[-1]
    sizes = [size for size in SIZES if min_tokens <= size < largest]
    while (size := -(-int(size * GROWTH) // STEP) * STEP) < largest:
        sizes.append(size)
    return [*sizes, largest]


def graph_shapes(
    max_num_batched_tokens: int,
    num_slots: int,
    min_tokens: int = 1,
    queries_per_kv: int = 1,
    tiles: tuple[int, ...] = TILES,
) -> list[Shape]:
    """Return sizes of graphs, largest first; each number of tokens up to the first fits one."""
    small, large = (tokens_of(tile, queries_per_kv) for tile in (tiles[0], tiles[-1]))
    shapes: set[Shape] = set()
    for size in graph_sizes(max_num_batched_tokens, min_tokens):
        if small < large and (not shapes or size / GROWTH < num_slots * small):
            shapes.add(Shape(size, min(size, num_slots), small))
        if small == large or size > small:
            # Each row, and the rest of it in whole tiles.
            shapes.add(Shape(size, min(size, num_slots + size // large), large))
    return sorted(shapes, key=lambda of: (of.tokens, of.max_q), reverse=True)


def padded(tokens: np.ndarray, packing: CachePacking, shape: Shape, inputs: np.ndarray) -> None:
    """Fill in what a graph of B tokens and S sequences reads, int32 [5, B + 1 or more].

    Token ids, places in the flattened cache and positions (B each); where the sequences' new tokens
    begin (S + 1) and their rows of the block table (S). Sequences are pieces of rows of up to max_q
    tokens each, then empty ones."""
    ids, place, position = inputs[:3, : shape.tokens]
    first, table_row = inputs[3:, : shape.sequences + 1]
    cache, count = packing.cache, len(tokens)
    slot, width = pieces(packing.count, shape.max_q)
    ids[:count], position[:count] = tokens, packing.index[1]
    place[:count], place[count:] = cache.places(*packing.index), cache.spare
    table_row[: len(slot)] = slot
    first[1 : len(slot) + 1] = width.cumsum()
    first[len(slot) + 1 :] = count


def rehearse(run: Callable[[], object]) -> None:
    """Run what is to be recorded, as libraries set themselves up at their first call. CUDA only.

    Raises RuntimeError if `run` waits for the GPU: here that does less harm than in a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def capture(run: Callable[[], object], memory: WeakSet | None = None) -> Callable[[], None]:
    """Record `run`; return a call that replays it. CUDA only.

    memory: graphs that share theirs, of which this becomes one. An error of `run` is raised
    unchanged, and leaves torch as it was: `torch.cuda.graph` would raise another one instead, and
    leave its stream current."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    pool = next((of.pool() for of in memory or ()), None) or torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # for the pool, which takes no memory that is reserved for others
    torch.cuda.set_stream(_capture_stream())
    try:
        # NCCL's watchdog asks for events meanwhile, in a thread of its own.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        run()
        graph.capture_end()
    except BaseException:
        _abandon(graph, pool)
        raise
    finally:
        torch.cuda.set_stream(before)
    if memory is not None:
        memory.add(graph)
    return graph.replay


@cache
def _capture_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: the allocator shares memory within a stream."""
    return torch.cuda.Stream()


_abandoned: list[torch.cuda.CUDAGraph] = []  # the allocator of pinned memory may still ask them


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple) -> None:
    """End a capture that has failed, on its stream, and give back what torch holds for it.

    torch gives nothing back where CUDA refuses to end the capture: its allocator then keeps the
    pool, and until the process ends frees no memory for an allocation that finds none."""
    _abandoned.append(graph)
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # has ended, or has been invalidated, which ends it too
        graph.capture_end()
    graph.reset()
    with contextlib.suppress(RuntimeError):  # that the pool is in no capture: torch has ended it
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    # In torch 2.11 the generator stays in the capture, and would refuse to draw outside.
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
