"""Stand-ins for CUDA graphs and for the kernels in them, on a CPU.

`Tape` records the tensor operations of a forward and replays them on the same memory, so that
values from the host are frozen, as in a graph. The kernels do what their documentation says, with
tensors alone.
"""

import sys
import types
from collections.abc import Callable

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bubblespec.engine import graphs
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.packing import pack_rows
from bubblespec.engine.pages import Pages
from bubblespec.mechanisms.batch_invariant import InvariantForward

ALONE = "varlen, alone"
POOL = ("the pool",)
LENGTH = 130  # positions of a row

aten = torch.ops.aten


def varlen_attn(
    query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k,
    num_splits=1, block_table=None,
) -> torch.Tensor:  # fmt: skip
    """Compute torch's documented attention, causal from the last key backwards; NaN for a broken
    rule."""
    if block_table is not None:
        assert block_table.dtype == torch.int32 and len(block_table) == len(cu_q) - 1
        length = block_table.shape[1] * key.shape[1]
        key, value = (t[block_table.long()].flatten(0, 2) for t in (key, value))
        cu_k = torch.arange(len(cu_q), dtype=torch.int32) * length
    if seqused_k is None:
        seqused_k = cu_k.diff()
    left, right = window_size
    assert cu_q.dtype == cu_k.dtype == seqused_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    fold = query.shape[1] // key.shape[1]
    is_folded = max_q == 1 and fold > 1 and left < 0 and right < 0
    if right < 0:  # a single query sees all keys, as it should
        assert left < 0 and max_q == 1 and len(query) == len(cu_q) - 1
    assert right <= 0 and (num_splits == 1 or is_folded), "else splits leave rows unwritten"
    token = torch.arange(len(query))
    # With folded heads the kernel takes sequence i to have token i.
    sequence = token if is_folded else torch.searchsorted(cu_q, token, right=True) - 1
    begin, used = cu_q[sequence], seqused_k[sequence]
    # Where the token is among the keys of its sequence.
    position = used - (cu_q[sequence + 1] - begin) + token - begin
    index = torch.arange(len(key)) - cu_k[sequence][:, None]
    seen = (index >= 0) & (index <= position[:, None])
    if left >= 0:
        seen &= index >= position[:, None] - left
    assert enable_gqa == (fold > 1)
    key, value = key.repeat_interleave(fold, 1), value.repeat_interleave(fold, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)
    is_right = (token - begin < max_q) & (position >= 0)
    is_right &= (used <= max_k) & (cu_k[sequence] + used <= len(key))
    return out.masked_fill(~is_right[:, None, None], float("nan"))


def flash_attn_varlen_func(
    query, key, value, cu_q, cu_k, max_q, max_k, softmax_scale, causal, window_size,
    block_table=None,
) -> torch.Tensor:  # fmt: skip
    """Compute the flash_attn package's attention over pages or whole sequences."""
    assert causal == (window_size[1] == 0)
    options = {"scale": softmax_scale, "window_size": window_size, "num_splits": 1}
    options |= {"enable_gqa": query.shape[1] > key.shape[-2], "seqused_k": cu_k.diff()}
    if block_table is not None:
        options["block_table"] = block_table.clamp(max=len(key) - 1)
    return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, **options)


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


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(NoWaits):
    """Context that records tensor operations; `replay` repeats them on the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for function, args, kwargs, recorded in self.calls:
            result = function(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
                if isinstance(old, torch.Tensor) and memory(old) != memory(new):
                    old.copy_(new)


class Captures:
    """Stand-in for `graphs.capture` that counts; a replay overwrites all other graphs' results."""

    def __init__(self):
        self.sizes, self.results, self.pools = [], [], []

    def __call__(self, run, pool):
        tape = Tape()
        with tape:
            hidden = run()

        def replay() -> None:
            for other in self.results:
                other.fill_(float("nan"))
            tape.replay()

        for noted, value in ((self.sizes, len(hidden)), (self.results, hidden), (self.pools, pool)):
            noted.append(value)
        return replay, hidden, POOL


def install_flash_attn(monkeypatch, function: Callable) -> None:
    """Put `function` in place of the flash_attn package's, installed or not."""
    package = types.SimpleNamespace(flash_attn_varlen_func=function)
    monkeypatch.setitem(sys.modules, "flash_attn", package)


def stand_in(monkeypatch) -> Captures:
    """Put stand-ins for graphs and kernels in place, on a CPU."""
    captures = Captures()
    monkeypatch.setattr("bubblespec.engine.attention.varlen_attn", varlen_attn)
    install_flash_attn(monkeypatch, flash_attn_varlen_func)
    monkeypatch.setattr(graphs, "rehearse", rehearse)
    monkeypatch.setattr(graphs, "capture", captures)
    has_graphs = lambda device, kernel: kernel != "sdpa"  # noqa: E731
    monkeypatch.setattr("bubblespec.engine.forward.can_capture", has_graphs)
    return captures


def assert_equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare up to rounding: last bits of float64, another order of summation in bfloat16."""
    tolerance = 1e-9 if got.dtype == torch.float64 else 0.03
    scale = wanted.abs().max().clamp(min=1.0)
    assert ((got - wanted).abs().max() / scale).item() < tolerance


def feed(model, cache: KVCache, sequences, start, count, run) -> torch.Tensor:
    """Return hidden states of the next count[r] tokens of sequences r, by run(tokens, packing)."""
    packing = pack_rows(cache, np.array(start), np.array(count), model.device)
    fed = [s[a : a + n] for s, a, n in zip(sequences, start, count, strict=True)]
    return run(np.concatenate(fed), packing)


def take_pages(runner) -> None:
    """Reserve all pages that rows may need, for forwards without an engine."""
    if runner.pages is not None:
        runner.pages.grow(np.full(runner.num_slots, runner.cache.slot_length))


def forward_of(model, kernel: str = "sdpa") -> ModelForward:
    """Create the forward with a kernel; ALONE: batch-invariant."""
    if kernel != ALONE:
        return ModelForward(model, kernel)
    forward = InvariantForward(model, "varlen")
    forward.min_tokens = 1
    return forward


def eager(model, kernel: str = "sdpa") -> Callable:
    """Return the forward without graphs, for `feed`."""
    forward, device = forward_of(model, kernel), model.device
    return lambda tokens, packing: forward.hidden(torch.from_numpy(tokens).to(device), packing)


def prepared(make_model, name: str = "llama", device: torch.device | None = None):
    """Create a model, in float64 on a CPU, in bfloat16 on a GPU, as its kernels compute."""
    device = device or torch.device("cpu")
    model = make_model(name, torch.float64 if device.type == "cpu" else torch.bfloat16).to(device)
    prepare_model(model, LENGTH)
    return model


def in_pages(num_slots: int, slot_length: int, page_size: int) -> KVCache:
    """Create a cache whose rows have taken all pages in turn, so that none lies in one piece."""
    width = slot_length // page_size
    pages = Pages(num_slots, slot_length, num_slots * width, page_size)
    for number in range(1, width + 1):
        pages.grow(np.full(num_slots, number * page_size))
    return KVCache(num_slots, slot_length, num_spare=1, pages=pages)
