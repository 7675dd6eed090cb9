"""Attention over ragged rows against one token at a time, and the choice of kernel."""

import importlib.util
import inspect
import types
from functools import partial

import numpy as np
import pytest
import torch
from bubblespec.engine.kernels import choose_kernel

from bubblespec.config_file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import attention, kernels
from bubblespec.engine.attention import bubblespec_attention
from bubblespec.engine.graphs import ForwardGraphs
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.packing import PAGE, pack_rows
from bubblespec.setup import build
from tests.helpers.graphs import (
    ALONE,
    LENGTH,
    assert_equal,
    eager,
    feed,
    flash_attn_varlen_func,
    forward_of,
    in_pages,
    install_flash_attn,
    prepared,
    stand_in,
    varlen_attn,
)
from tests.helpers.models import VOCAB
from tests.helpers.runs import SHORT


def attend_row_by_row(query, keys, values, start, count, *, scaling, window):
    """Plain attention, one token at a time. query: [N, H, D]; keys, values: [slots, L, K, D]."""
    fold, out = query.shape[1] // keys.shape[2], []
    for slot, (begin, n) in enumerate(zip(start.tolist(), count.tolist(), strict=True)):
        for position in range(begin, begin + n):
            seen = slice(max(0, position + 1 - (window or position + 1)), position + 1)
            key, value = (t[slot, seen].repeat_interleave(fold, dim=1) for t in (keys, values))
            weights = (torch.einsum("hd,khd->hk", query[len(out)], key) * scaling).softmax(-1)
            out.append(torch.einsum("hk,khd->hd", weights, value))
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 1, 9, 64])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_groups_of_ragged_rows_equal_rows_one_by_one(heads, kv_heads, window):
    """Drafts of all widths, decoding, prompts and rows without tokens, in random order and by
    width; one group and many, padded and not; value heads smaller than key heads."""
    rng, generator = np.random.default_rng(heads), torch.Generator().manual_seed(heads)
    layer, seen = types.SimpleNamespace(layer_idx=0), set()
    widths = [[1], [0, 1], [4], [0, 1, 2, 3, 8, 16], [1] * 12 + [16], [1] * 8 + [60]]
    randn = partial(torch.randn, generator=generator, dtype=torch.float64)
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
        options = {"scaling": 0.3, "sliding_window": window, "packing": packing}
        got = bubblespec_attention(layer, query, key, value, None, **options)[0][0]
        past = (past.keys, past.values, start, count)
        wanted = attend_row_by_row(query[0].transpose(0, 1), *past, scaling=0.3, window=window)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        seen.add((len(packing.groups) > 1, packing.padding is not None))
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


def test_kernel_choice_follows_device_and_type(monkeypatch):
    """By device, type and installed packages."""
    monkeypatch.setattr(kernels, "difference_of", lambda kernel, model: None)
    has_flash = importlib.util.find_spec("flash_attn") is not None

    def choose(requested: str, device: str, dtype: torch.dtype) -> tuple[str, str | None]:
        model = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
        return choose_kernel(requested, model, frozenset())

    half, single = torch.bfloat16, torch.float32
    assert choose("auto", "cpu", half) == choose("sdpa", "cuda", half) == ("sdpa", None)
    assert choose("auto", "cuda", half) == ("flash_attn" if has_flash else "varlen", None)
    kernel, line = choose("auto", "cuda", single)
    assert kernel == "sdpa" and "varlen computes in bfloat16 only; set sdpa for float32" in line
    with pytest.raises(ValueError, match="attention: varlen runs on CUDA only; set sdpa on cpu"):
        choose("varlen", "cpu", half)
    with pytest.raises(ValueError, match="varlen computes in bfloat16 only; set sdpa for float32"):
        choose("varlen", "cuda", single)
    if not has_flash:
        with pytest.raises(ValueError, match="flash_attn is not installed"):
            choose("flash_attn", "cuda", half)


@pytest.fixture
def kernels_on_cpu(monkeypatch) -> None:
    """Stand-ins for them, which `auto` tries."""
    stand_in(monkeypatch)
    monkeypatch.setattr(kernels, "problem_of", lambda *arguments: None)
    monkeypatch.setattr(kernels, "kernels_for", lambda device: ["flash_attn", "varlen", "sdpa"])


def raises(*arguments, **options):
    raise ImportError("undefined symbol:\n  of another torch")


@pytest.mark.parametrize(
    "broken, why",
    [
        (raises, "flash_attn fails: ImportError: undefined symbol: of another torch"),
        (lambda query, *rest, **options: 0 * query, "flash_attn logits differ from sdpa's by "),
    ],
)
def test_broken_kernel_falls_back_with_reason(make_model, monkeypatch, kernels_on_cpu, broken, why):
    """`auto` tries the next kernel and names the reason; a key that names the kernel is an
    error."""
    model = make_model("mistral-window")
    parts = model, prepare_model(model, 64)
    assert choose_kernel("auto", *parts) == ("flash_attn", None)
    install_flash_attn(monkeypatch, broken)
    kernel, line = choose_kernel("auto", *parts)
    assert kernel == "varlen" and line.startswith(f"attention is varlen: {why}")
    assert line.endswith(" (model.attention=varlen tries nothing else)")
    with pytest.raises(ValueError, match=f"^model.attention: {why}"):
        choose_kernel("flash_attn", *parts)
    monkeypatch.setattr("bubblespec.engine.attention.varlen_attn", raises)
    kernel, line = choose_kernel("auto", *parts)
    assert kernel == "sdpa" and "; varlen fails: ImportError" in line and "\n" not in line


def test_kernel_broken_on_another_rank_falls_back(make_model, kernels_on_cpu):
    model, of_ranks = make_model("llama"), iter([["", "fails: OSError: no"], ["", ""]])
    found = choose_kernel("auto", model, prepare_model(model, 64), lambda own: next(of_ranks))
    why = "flash_attn fails: OSError: no (model.attention=varlen tries nothing else)"
    assert found == ("varlen", f"attention is varlen: {why}")


def test_run_warns_of_kernel_fallback(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("bubblespec.setup.choose_kernel", lambda *parts: ("sdpa", "a line"))
    config = load_config("configs/tiny_cpu.yaml", [*SHORT, f"run.output_dir={tmp_path}"])
    trainer = build(config, Ranks(torch.device("cpu")))
    trainer.lock.close()
    assert trainer.learner.kernel == "sdpa"
    assert capsys.readouterr().err.splitlines().count("warning: a line") == 1


@pytest.mark.parametrize("name", ["mistral-window", "qwen2"])
def test_attention_of_older_torch_equals_sdpa(make_model, kernels_on_cpu, monkeypatch, name):
    """torch 2.11 has no `num_splits`; 2.12 has it and refuses it: the operator is called."""
    folded = []

    def refuse(*args, **kwargs):
        raise AssertionError("num_splits requires FA3")

    def operator(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale, window_size_left, window_size_right, seqused_k,
    ) -> tuple:  # fmt: skip
        window = (window_size_left, window_size_right)
        assert dropout_p == 0.0 and not return_debug_mask and is_causal == (window == (-1, 0))
        options = {"scale": scale, "window_size": window, "seqused_k": seqused_k}
        options["enable_gqa"] = query.shape[1] > key.shape[1]
        folded.append(window == (-1, -1))
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        return varlen_attn(query, key, value, *lengths, **options, num_splits=1), None

    schema = torch.ops.aten._flash_attention_forward.default._schema.arguments
    names = list(inspect.signature(operator).parameters)
    assert [argument.name for argument in schema][: len(names)] == names
    monkeypatch.setattr(attention, "HAS_PAGES", False)
    monkeypatch.setattr(attention, "varlen_attn", refuse)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    model, cache, plain = prepared(make_model, name), KVCache(3, LENGTH), KVCache(3, LENGTH)
    sequences = np.random.default_rng(0).integers(1, VOCAB, (3, LENGTH))
    with torch.inference_mode():
        for start, count in (([0, 0, 0], [9, 1, 20]), ([9, 1, 20], [1, 1, 1])):
            wanted = feed(model, plain, sequences, start, count, eager(model))
            got = feed(model, cache, sequences, start, count, eager(model, "varlen"))
            assert_equal(got, wanted)
    assert not attention.reads_pages("varlen")
    assert any(folded) == (name == "qwen2"), "a window bounds what is seen"


@pytest.mark.parametrize("kernel", ["varlen", "flash_attn", ALONE])
@pytest.mark.parametrize("is_captured", [False, True])
def test_decoding_folds_query_heads(make_model, kernels_on_cpu, monkeypatch, kernel, is_captured):
    """FlashAttention-2 reads keys once for all query heads if no row feeds more than one token and
    no bound is given. Batch-invariant forwards keep the bound, and one split."""
    model, cache = prepared(make_model, "qwen2"), in_pages(3, 2 * PAGE, PAGE)
    sequences, calls = np.random.default_rng(0).integers(1, VOCAB, (3, PAGE)), []

    def note(query, key, *args, **options):
        calls.append((args[3], options["window_size"][1], options.get("num_splits", 0)))
        attend = flash_attn_varlen_func if kernel == "flash_attn" else varlen_attn
        return attend(query, key, *args, **options)

    monkeypatch.setattr(attention, "varlen_attn", note)
    install_flash_attn(monkeypatch, note)
    captured = ForwardGraphs(forward_of(model, kernel), cache, 16)
    run = captured.forward if is_captured else eager(model, kernel)
    start = np.zeros(3, np.int64)
    bounds, plain = {}, KVCache(3, 2 * PAGE)
    with torch.inference_mode():
        for count in ([5, 3, 4], [1, 1, 1], [1, 0, 1], [2, 0, 1]):
            wanted = feed(model, plain, sequences, start, count, eager(model))
            if not is_captured:
                calls.clear()
            assert_equal(feed(model, cache, sequences, start, count, run)[: len(wanted)], wanted)
            start += count
            bounds |= {max_q: (right, splits) for max_q, right, splits in calls}
    wide = {shape for max_q, shape in bounds.items() if max_q > 1}
    # In a graph windows and short prompts are single tokens too.
    bounded = set() if is_captured and kernel != ALONE else {(0, int(kernel != "flash_attn"))}
    none = {"flash_attn": (-1, 0), "varlen": (-1, None)}.get(kernel, (0, 1))
    assert captured.problem is None and bounds[1] == none and wide == bounded
