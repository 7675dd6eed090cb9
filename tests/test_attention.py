"""Attention over ragged rows against one token at a time, and the choice of training's kernel."""

import importlib.util
import sys
import types
from functools import partial

import numpy as np
import pytest
import torch

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import attention
from bubblespec.engine.attention import KERNELS, bubblespec_attention, choose_kernel
from bubblespec.engine.comparison import random_tokens
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.engine.model import forward_hidden, pack_sequences
from bubblespec.engine.model_checks import TRAINED, kernel_difference
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.setup import build
from tests.helpers.runs import SHORT


def attend_row_by_row(query, keys, values, start, count, options: AttentionOptions):
    """Plain attention, one token at a time. query: [N, H, D]; keys, values: [slots, L, K, D]."""
    queries_per_kv, out = query.shape[1] // keys.shape[2], []
    scaling, window, cap, sinks, chunk = options
    for slot, (begin, n) in enumerate(zip(start.tolist(), count.tolist(), strict=True)):
        for position in range(begin, begin + n):
            first = max(0, position + 1 - (window or position + 1))
            first = max(first, position - position % chunk) if chunk else first
            seen = slice(first, position + 1)
            key, value = (
                t[slot, seen].repeat_interleave(queries_per_kv, dim=1) for t in (keys, values)
            )
            score = torch.einsum("hd,khd->hk", query[len(out)], key) * scaling
            weight = (score if cap is None else cap * (score / cap).tanh()).exp()
            total = weight.sum(-1) + (0.0 if sinks is None else sinks.exp())
            out.append(torch.einsum("hk,khd->hd", weight / total[:, None], value))
    return torch.stack(out)


class Layer:
    """A layer of a model, with full attention or chunks."""

    layer_idx = 0

    def __init__(self, chunk: int | None):
        kinds = ["chunked_attention" if chunk else "full_attention"]
        self.config = types.SimpleNamespace(layer_types=kinds, attention_chunk_size=chunk)


@pytest.mark.parametrize(
    "window, cap, has_sinks, chunk",
    [
        *((window, None, False, None) for window in (None, 1, 9, 64)),
        (None, 0.5, False, None),
        (9, 0.5, True, None),
        (None, None, True, 16),
        (None, None, False, 1),
    ],
)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_groups_of_ragged_rows_equal_rows_one_by_one(
    heads, kv_heads, window, cap, has_sinks, chunk
):
    """Drafts of all widths, decoding, prompts and rows without tokens, in random order and by
    width; one group and many, padded and not; value heads smaller than key heads."""
    rng, generator = np.random.default_rng(heads), torch.Generator().manual_seed(heads)
    layer, seen = Layer(chunk), set()
    widths = [[1], [0, 1], [4], [0, 1, 2, 3, 8, 16], [1] * 12 + [16], [1] * 8 + [60]]
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
    sinks = randn(heads) if has_sinks else None
    for case in range(3 * len(widths)):
        cache, rows = KVCache(24, 160), int(rng.integers(1, 24))
        past = cache.layer(0, *(randn(1, kv_heads, d) for d in (8, 5)))
        for part in (past.keys, past.values):
            part.copy_(randn(*part.shape))
        count = rng.choice(widths[case % len(widths)], rows)
        count[rng.integers(rows)] = max(count.max(), 1)
        if case >= len(widths):  # groups without padding
            count.sort()
        start = rng.integers(0, 100, rows) if case % 2 else np.full(rows, 70)
        packing = pack_rows(cache, start, count, torch.device("cpu"))
        shape = (1, heads, int(count.sum()))
        query = torch.randn(*shape, 8, generator=generator, dtype=torch.float64)
        key, value = (
            torch.randn(1, kv_heads, shape[2], d, generator=generator, dtype=torch.float64)
            for d in (8, 5)
        )
        given = {"scaling": 0.3, "sliding_window": window, "softcap": cap, "s_aux": sinks}
        got = bubblespec_attention(layer, query, key, value, None, packing, **given)[0][0]
        past = (past.keys, past.values, start, count)
        options = AttentionOptions(0.3, window, cap, sinks, chunk)
        wanted = attend_row_by_row(query[0].transpose(0, 1), *past, options)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        seen.add((len(packing.groups) > 1, packing.padding is not None))
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


NO_HEADS = frozenset({(16, 16)})


def test_kernel_choice_follows_device_and_type():
    has_flash = importlib.util.find_spec("flash_attn") is not None

    def choose(requested: str, device: str, dtype: torch.dtype, heads=NO_HEADS):
        model = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
        return choose_kernel(requested, model, heads, lambda kernel: None)

    half, single = torch.bfloat16, torch.float32
    assert choose("auto", "cpu", half) == choose("sdpa", "cuda", half) == ("sdpa", None)
    assert choose("auto", "cuda", half) == ("flash_attn" if has_flash else "varlen", None)
    kernel, line = choose("auto", "cuda", single)
    assert kernel == "sdpa" and "varlen computes in bfloat16 only; set sdpa for float32" in line
    kernel, line = choose("auto", "cuda", half, frozenset({(24, 16)}))
    assert kernel == "sdpa" and "query and key heads have 24 and its value heads 16" in line
    with pytest.raises(ValueError, match="attention: varlen runs on CUDA only; set sdpa on cpu"):
        choose("varlen", "cpu", half)
    with pytest.raises(ValueError, match="varlen computes in bfloat16 only; set sdpa for float32"):
        choose("varlen", "cuda", single)
    if not has_flash:
        with pytest.raises(ValueError, match="flash_attn is not installed"):
            choose("flash_attn", "cuda", half)


def raises(kernel: str) -> str | None:
    raise ImportError("undefined symbol:\n  of another torch")


GPU = types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "check, why",
    [
        (raises, "varlen fails: ImportError: undefined symbol: of another torch"),
        (lambda kernel: "hidden states differ by 1e+00", "varlen hidden states differ by 1e+00"),
    ],
)
def test_broken_kernel_falls_back_with_reason(monkeypatch, check, why):
    """`auto` tries the next kernel; a key that names the kernel is an error."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kernel, line = choose_kernel("auto", GPU, NO_HEADS, check)
    assert kernel == "sdpa" and line.startswith(f"attention in training is sdpa: {why}")
    assert line.endswith(" (model.attention=sdpa tries nothing else)") and "\n" not in line
    with pytest.raises(ValueError, match=f"^model.attention: {why.replace('+', '.')}"):
        choose_kernel("varlen", GPU, NO_HEADS, check)


def test_kernel_broken_on_another_rank_falls_back(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gather = lambda own: [own, "fails: OSError: no"]  # noqa: E731
    kernel, line = choose_kernel("auto", GPU, NO_HEADS, lambda kernel: None, gather)
    assert kernel == "sdpa" and "varlen fails: OSError: no" in line


def test_kernels_are_compared_with_sdpa_in_training(make_model, monkeypatch):
    """In sequences of such lengths that a kernel's splits and windows count."""
    model = make_model("mistral-window", max_length=64)
    tokens, packing = random_tokens(model, sum(TRAINED)), pack_sequences(TRAINED, model.device)
    for factor, differs in ((1.0, False), (1.5, True)):

        def wrong(*given, factor=factor):
            *rest, options = given
            return KERNELS["sdpa"](*rest, options._replace(scaling=factor * options.scaling))

        monkeypatch.setitem(KERNELS, "varlen", wrong)
        found, wanted = (forward_hidden(model, tokens, packing, of) for of in ("varlen", "sdpa"))
        assert torch.equal(found, wanted) != differs
        line = kernel_difference(model, "varlen")
        assert (line is not None) == differs
    assert line.startswith("hidden states differ from sdpa's by ")


@pytest.mark.parametrize("returns_more", [False, True])
def test_flash_attention_3_is_for_one_kind_of_gpu(monkeypatch, returns_more):
    calls, major = [], [9]

    def function(query, key, value, *offsets, softmax_scale, causal, window_size):
        calls.append((softmax_scale, causal, window_size, *offsets[2:]))
        return (query, None) if returns_more else query

    interface = types.SimpleNamespace(flash_attn_varlen_func=function)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", interface)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "flash_attn_interface" or None
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major[0], 0))
    choose = lambda: choose_kernel("auto", GPU, NO_HEADS, lambda kernel: None)  # noqa: E731
    assert choose() == ("flash_attn_3", None)
    major[0] = 8
    kernel, line = choose()
    assert kernel == "varlen" and "flash_attn_3 is for GPUs of compute capability 9" in line
    query = torch.randn(9, 4, 8)
    packing = pack_sequences([4, 5], query.device)
    out = KERNELS["flash_attn_3"](packing, query, query, query, AttentionOptions(0.3, 5))
    assert out is query and calls == [(0.3, True, (4, 0), 5, 5)]


@pytest.mark.parametrize("window", [None, 5])
def test_attention_of_older_torch_calls_the_operator(monkeypatch, window):
    calls = []

    def operator(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale, window_size_left, window_size_right,
    ) -> tuple:  # fmt: skip
        calls.append((window_size_left, window_size_right, is_causal, max_q, max_k, scale))
        assert dropout_p == 0.0 and not return_debug_mask and torch.equal(cum_seq_q, cum_seq_k)
        return query, None

    monkeypatch.setattr(attention, "HAS_WINDOWS", False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    query, key = torch.randn(9, 4, 8), torch.randn(9, 2, 8)
    packing = pack_sequences([4, 5], query.device)
    KERNELS["varlen"](packing, query, key, key, AttentionOptions(0.3, window))
    assert calls == [(-1 if window is None else 4, 0, window is None, 5, 5, 0.3)]


@pytest.mark.parametrize("kernel", ["varlen", "flash_attn"])
@pytest.mark.parametrize("option", [{"cap": 0.5}, {"sinks": torch.zeros(4)}, {"chunk": 3}])
def test_kernels_refuse_other_attention(monkeypatch, kernel, option):
    """`auto` takes sdpa then."""
    function = types.SimpleNamespace(flash_attn_varlen_func=None)
    monkeypatch.setitem(sys.modules, "flash_attn", function)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flash_attn" or None)
    query, packing = torch.randn(9, 4, 8), pack_sequences([4, 5], torch.device("cpu"))

    def check(name: str) -> None:
        KERNELS[name](packing, query, query, query, AttentionOptions(0.3, **option))

    with pytest.raises(ValueError, match=f"attention: {kernel} computes no caps, sinks"):
        choose_kernel(kernel, GPU, NO_HEADS, check)
    chosen, line = choose_kernel("auto", GPU, NO_HEADS, check)
    assert chosen == "sdpa" and "varlen computes no caps, sinks and chunks" in line


def test_run_warns_of_kernel_fallback(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("bubblespec.setup.choose_kernel", lambda *parts: ("sdpa", "a line"))
    config = load_config("configs/tiny_cpu.yaml", [*SHORT, f"run.output_dir={tmp_path}"])
    trainer = build(config, Ranks(torch.device("cpu")))
    trainer.lock.close()
    assert trainer.learner.kernel == "sdpa"
    assert capsys.readouterr().err.splitlines().count("warning: a line") == 1
