"""CUDA graphs of the packed forward: a forward of few tokens as one launch instead of hundreds.

A graph replays the same kernels on the same addresses. So a forward is padded to a fixed number of
tokens, and what changes between forwards (token ids, places in the cache, lengths) is copied into
one tensor at a fixed address; the block table has a fixed address too. Padding follows the real
tokens, in sequences that write and read a spare slot or page. Attention sees its own sequence only,
so the real tokens' results are those of the unpadded forward, up to the rounding of matrix products
of another height.

Attention launches ceil(max_q / NARROW) blocks for each sequence and head, also for sequences
without tokens. So a row that feeds more than NARROW tokens is several sequences, each of which sees
the keys up to its last token, and graphs have room for few sequences or for many.

Where no sequence has more than one token, attention reads keys once for all query heads of a
key/value head, and splits long rows (see `attention._has_one_query`). So a row that verifies a few
draft tokens is a sequence for each of them, where that launches no more blocks (see `shape_of`).

All graphs are captured at the first forward, before anything is timed, the largest first; the
others share its memory. Graphs contain the addresses of keys, values and weights: weights must be
changed in place (optimizers do, LoRA too), and `clear` must follow a release of the cache.

A forward of several ranks has their sums in its graphs, and a sum waits for the same graph on the
other ranks. So all ranks have graphs, captured in the same order, or none has any. Neither of the
two stages of capturing exchanges anything (NCCL: distributed/device.py), and the ranks exchange the
outcome of each; so a rank whose memory runs out may repeat a stage alone. First every rank runs
each forward without its sums, where errors of one rank show. Then each records its graphs, without
computing a sum. In between the ranks sum zeros in every size, as NCCL connects them at a size's
first use.

Shape legend: N tokens of a forward, B >= N tokens of a graph, S sequences that it has room for.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from bubblespec.engine.forward import Forward
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.packing import CachePacking, Varlen, pack_rows
from bubblespec.engine.ragged import ragged
from bubblespec.errors import fallback, first_problem, log, one_line

# Tokens of graphs of single tokens. Beyond 8 no step is larger than a third: below about 250 tokens
# reading the weights takes longer than computing with them, so padding costs next to nothing.
# Larger forwards keep a GPU busy for as long as launching them takes.
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# The same for sequences of several tokens.
WIDE_BUCKETS = (2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
# Sequences that these have room for, or one for each token. Up to the first number blocks cost next
# to nothing; beyond it a graph launches less than four times the blocks that its rows need.
ROOMS = (64, 240, 512)
OUT_OF_MEMORY = "out of memory"  # in the message of torch.OutOfMemoryError, and of CUDA's errors
# Tokens that may be single whatever the rows: no slower than a block for each query head.
FEW = 32
# New tokens of a row up to which attention uses one block of queries, whatever bound it is given.
NARROW = 64


class Shape(NamedTuple):
    """Size of a graph: tokens, padding included; sequences; and new tokens of a sequence."""

    tokens: int
    sequences: int
    max_q: int


class PaddedPacking(NamedTuple):
    """The part of a `CachePacking` that attention reads, on the device."""

    cache: KVCache
    place: torch.Tensor
    position: torch.Tensor
    varlen: Varlen


class _Graph(NamedTuple):
    inputs: torch.Tensor
    replay: Callable[[], None]
    hidden: torch.Tensor


class ForwardGraphs:
    """CUDA graphs of one forward over one cache, which must have a spare slot.

    Ranks that compute together call `forward`, with the same packing, and `clear` alike."""

    def __init__(
        self, forward: Forward, cache: KVCache, max_num_batched_tokens: int, state_size: int = 0
    ):
        """state_size: width of a second input of `forward.hidden`, one vector a token, or 0."""
        self.of, self.cache, self.state_size = forward, cache, state_size
        self.states: torch.Tensor | None = None
        """Second input at a fixed address, [B of the largest, state_size]."""
        sizes = (max_num_batched_tokens, cache.num_slots, cache.slot_length)
        self.shapes = graph_shapes(*sizes, forward.min_tokens, forward.heads_per_key)
        """Sizes, largest first."""
        self.num_replays = 0
        self.problem: str | None = None
        """One line that says why the forward cannot be captured, here or on another rank."""
        self._has_warned = False
        self._graphs: dict[Shape, _Graph] = {}

    def forward(
        self,
        tokens: np.ndarray | torch.Tensor,
        packing: CachePacking,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Return the last hidden states [B, hidden] of packed tokens int64 [N], first those of N.

        They are valid until the next forward of graphs that share their memory. None if no graph
        fits. tokens: on the host or the device; states: [N, state_size], the second input."""
        shape = self.shape_of(packing)
        if shape is None or self.problem:
            return None
        self.cache.block_table(packing.device)  # is up to date
        if not self._graphs:
            self._capture()
            if self.problem:
                return None
        graph = self._graphs[shape]
        known = tokens if isinstance(tokens, np.ndarray) else np.zeros(len(tokens), np.int64)
        padded = torch.from_numpy(pad(known, packing, shape))
        graph.inputs.copy_(padded, non_blocking=True)
        if isinstance(tokens, torch.Tensor):
            graph.inputs[0, : len(tokens)] = tokens
        if states is not None and self.states is not None:
            self.states[: len(states)] = states
        graph.replay()
        self.num_replays += 1
        return graph.hidden

    def shape_of(self, packing: CachePacking) -> Shape | None:
        """Return the smallest shape that fits, of single tokens where that launches no more blocks.

        A block serves one token and key/value head, or one piece of a row and query head."""
        tokens, pieces = packing.index.shape[1], int((-(-packing.count // NARROW)).sum())
        is_single = packing.count.max() == 1
        fold = self.of.heads_per_key
        is_single |= fold > 1 and tokens <= max(FEW, fold * pieces)
        for needed, are_single in ((tokens, True), (pieces, False)):
            if are_single and not is_single:
                continue
            fitting = (
                shape
                for shape in self.shapes
                if shape.tokens >= tokens
                and (shape.max_q == 1) == are_single
                and needed - (tokens - shape.tokens) // shape.max_q <= shape.sequences
            )
            if (found := min(fitting, default=None)) is not None:
                return found
        return None

    def clear(self) -> None:
        """Give graphs and their memory back; the next forward captures them again."""
        self._graphs.clear()
        self.of.memory.pools.pop(self, None)
        self.states = None
        if self.problem and OUT_OF_MEMORY in self.problem:
            self.problem = None

    def _capture(self) -> None:
        """Capture graphs of all shapes, or of none; on all ranks, or on none."""
        inputs: dict[Shape, torch.Tensor] = {}
        if self._on_all(lambda: self._rehearse(inputs)):
            self.of.connect()
            self._on_all(lambda: self._record(inputs))

    def _on_all(self, stage: Callable[[], None]) -> bool:
        """Whether all ranks have completed a stage that exchanges nothing; else all give up.

        Where memory runs out, the allocator's unused memory is given back for a second attempt."""

        def with_free_memory() -> None:
            self._graphs.clear()
            self.of.memory.pools.pop(self, None)
            torch.cuda.empty_cache()
            stage()

        problem = attempt(stage)
        if problem and OUT_OF_MEMORY in problem:
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

    def _rehearse(self, inputs: dict[Shape, torch.Tensor]) -> None:
        """Run each forward once, without sums over ranks; fills in the graphs' inputs."""
        weight = self.of.weight()
        if self.state_size:
            self.states = weight.new_zeros(self.shapes[0].tokens, self.state_size)
        no_rows = np.zeros(0, np.int64)
        nothing = pack_rows(self.cache, no_rows, no_rows, weight.device)
        with self.of.rehearsal([shape.tokens for shape in self.shapes]):
            for shape in self.shapes:
                padded = pad(no_rows, nothing, shape)
                inputs[shape] = torch.from_numpy(padded).to(weight.device)
                rehearse(partial(self._run, inputs[shape], shape))

    def _record(self, inputs: dict[Shape, torch.Tensor]) -> None:
        memory = self.of.memory
        for shape in self.shapes:
            run = partial(self._run, inputs[shape], shape)
            replay, hidden, memory.pools[self] = capture(run, memory.pool)
            self._graphs[shape] = _Graph(inputs[shape], replay, hidden)

    def _run(self, inputs: torch.Tensor, shape: Shape) -> torch.Tensor:
        ids, place, position = inputs[:3, : shape.tokens]
        cu_q, cu_k, used = inputs[3:, : shape.sequences + 1].to(torch.int32)
        length, table = self.cache.slot_length, self.cache.block_table(inputs.device)
        if table is not None:
            table = table.index_select(0, inputs[4, : shape.sequences])
        varlen = Varlen(cu_q, cu_k, used[:-1], shape.max_q, length, length, table)
        packing = PaddedPacking(self.cache, place, position, varlen)
        hidden: Callable[..., torch.Tensor] = self.of.hidden
        second = () if self.states is None else (self.states[: shape.tokens],)
        return hidden(ids, packing, *second)


def attempt(stage: Callable[[], None]) -> str | None:
    """Run a stage and return one line about its error, or None; the error's tensors are freed."""
    try:
        stage()
    except Exception as error:  # the model's own code runs here, and drivers
        return one_line(error)
    return None


def graph_shapes(
    max_num_batched_tokens: int,
    num_slots: int,
    slot_length: int,
    min_tokens: int = 1,
    fold: int = 1,
) -> list[Shape]:
    """Return sizes of graphs, largest first; padding must fit the spare slot."""

    def sizes(buckets: tuple[int, ...], needed: int) -> list[int]:
        largest = next((b for b in buckets if b >= max(needed, min_tokens)), buckets[-1])
        return [b for b in buckets if min_tokens <= b <= min(largest, slot_length)]

    single = num_slots
    if fold > 1:
        single = max(single, min(max(FEW, fold * num_slots), max_num_batched_tokens))
    shapes = {Shape(b, b, 1) for b in sizes(BUCKETS, single)}
    for b in sizes(WIDE_BUCKETS, max_num_batched_tokens):
        if fold > 1 and b <= FEW:
            continue
        rooms = [room for room in ROOMS if 1.5 * room <= b] + [b] * (b <= ROOMS[-1])
        # Each row, the rest of it and of the padding in pieces of NARROW tokens.
        needed = min(num_slots + 2 + b // NARROW, rooms[-1])
        count = next(i for i, room in enumerate(rooms, 1) if room >= needed)
        shapes |= {Shape(b, room, min(b, NARROW)) for room in rooms[:count]}
    return sorted(shapes, reverse=True)


def pad(tokens: np.ndarray, packing: CachePacking, shape: Shape) -> np.ndarray:
    """Return what a graph of B tokens and S <= B sequences reads, int64 [6, B + 1].

    Token ids, places in the flattened cache and positions (B each); where the sequences' new tokens
    begin, and their keys in the flattened cache or, with pages, their slots (S + 1 each); how many
    keys they have (S).
    Sequences are pieces of the rows that feed something, then of the padding, of up to max_q tokens
    each, then empty ones."""
    size, num_sequences, max_q = shape
    inputs = np.zeros((6, size + 1), np.int64)
    ids, place, position = inputs[:3]
    cu_q, cu_k, used = inputs[3:, : num_sequences + 1]
    cache, spare_slot = packing.cache, packing.cache.num_slots
    num_tokens, padding = len(tokens), size - len(tokens)
    ids[:num_tokens] = tokens
    place[:num_tokens], position[:num_tokens] = cache.places(*packing.index), packing.index[1]
    position[num_tokens:size] = np.arange(padding)
    # More padding than a page takes is written over other padding.
    spare = cache.num_pages * cache.page_size
    place[num_tokens:size] = spare + np.arange(padding) % cache.page_size
    slot, piece = ragged(-(-packing.count // max_q))
    end, fed = np.minimum((piece + 1) * max_q, packing.count[slot]), len(slot)
    behind = np.minimum(np.arange(num_sequences + 1 - fed) * max_q, padding)
    cu_q[1:fed] = (end - piece * max_q).cumsum()[:-1]
    cu_q[fed:] = num_tokens + behind
    if cache.pages is None:
        cu_k[:fed], cu_k[fed:] = slot * cache.slot_length, spare + behind
    else:
        cu_k[:fed], cu_k[fed:] = slot, spare_slot
    used[:fed], used[fed:-1] = packing.start[slot] + end, np.diff(behind)
    return inputs


def rehearse(run: Callable[[], torch.Tensor]) -> None:
    """Run what is to be recorded, as libraries set themselves up at their first call. CUDA only.

    Raises RuntimeError if `run` waits for the GPU: here that does less harm than in a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def capture(
    run: Callable[[], torch.Tensor], pool: Any
) -> tuple[Callable[[], None], torch.Tensor, tuple]:
    """Record `run`; return a call that replays it, its result, and the pool with its memory.

    CUDA only. pool: of an earlier capture, to share its memory; see `GraphMemory`."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events meanwhile, in a thread of its own.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        hidden = run()
    return graph.replay, hidden, graph.pool()
