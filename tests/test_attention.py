"""The attention seam: every kernel against SDPA, and the grouping of ragged rows against one row at a time."""

import importlib.util

import numpy as np
import pytest
import torch
from conftest import VOCAB

from bubblespec.engine.attention import choose_kernel
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import forward_hidden, prepare_model
from bubblespec.engine.packing import pack_rows, pack_sequences

LONG = 32  # a row that feeds more among rows that feed little attends on its own


def feed(model, cache, sequences, start, count, kernel="sdpa", device="cpu"):
    """Hidden states of sequences[r][start[r] : start[r] + count[r]] for all rows r in one packed forward."""
    packing = pack_rows(cache, np.array(start), np.array(count), torch.device(device))
    fed = np.concatenate([s[a : a + n] for s, a, n in zip(sequences, start, count, strict=True)])
    return forward_hidden(model, torch.from_numpy(fed).to(device), packing, kernel)


COUNTS = [[1, 1, 1, 1, 1], [LONG + 9, 1, 1, 0, 1], [0, 5, 0, 2, 0], [3, LONG + 1, 7, LONG, 30], [2, 6, 3, 1, 2], [0, 0, 0, 0, 1]]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt_neox"])
def test_ragged_forwards_equal_each_sequence_alone(make_model, name):
    """Five rows advance by different counts in each forward; oracle: the model's own forward of each whole sequence."""
    reference, model = make_model(name), make_model(name)
    prepare_model(model, 300)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, VOCAB, 300) for _ in range(5)]
    cache = KVCache(5, 300)
    start = np.zeros(5, np.int64)
    got = [[] for _ in sequences]
    with torch.no_grad():
        for count in COUNTS * 2:
            hidden = feed(model, cache, sequences, start, count)
            for parts, part in zip(got, hidden.split(count), strict=True):
                parts.append(part)
            start += count
        for sequence, length, parts in zip(sequences, start, got, strict=True):
            wanted = reference.base_model(torch.from_numpy(sequence[:length])[None]).last_hidden_state[0]
            torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-9, atol=1e-9)


def test_rollback_is_lowering_the_length(make_model):
    """Positions beyond a row's length may hold anything: feeding other tokens there first changes nothing."""
    model = make_model()
    prepare_model(model, 100)
    rng = np.random.default_rng(1)
    sequence, wrong = rng.integers(1, VOCAB, (2, 40))
    with torch.no_grad():
        clean, dirty = KVCache(1, 100), KVCache(1, 100)
        for cache in (clean, dirty):
            feed(model, cache, [sequence], [0], [10])
        feed(model, dirty, [wrong], [10], [25])
        results = [feed(model, cache, [sequence], [10], [8]) for cache in (clean, dirty)]
    assert torch.equal(*results)


def test_choice_of_kernel():
    cpu, cuda, half = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
    assert choose_kernel("auto", cpu, half) == choose_kernel("auto", cuda, torch.float32) == "sdpa"
    with pytest.raises(ValueError, match=r"model.attention: varlen runs on CUDA only; on cpu use sdpa"):
        choose_kernel("varlen", cpu, half)
    with pytest.raises(ValueError, match=r"model.attention: varlen computes in bfloat16; for float32 use sdpa"):
        choose_kernel("varlen", cuda, torch.float32)
    if importlib.util.find_spec("flash_attn") is None:
        assert choose_kernel("auto", cuda, half) == "varlen"
        with pytest.raises(ValueError, match="flash_attn is not installed"):
            choose_kernel("flash_attn", cuda, half)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["varlen", "flash_attn"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_cuda_kernels_equal_sdpa(make_model, name, kernel):
    """In bfloat16, cached and whole sequences, to the rounding of the type."""
    if kernel == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash_attn is not installed")
    model = make_model(name, torch.bfloat16).cuda()
    prepare_model(model, 256)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, VOCAB, 256) for _ in range(5)]
    with torch.no_grad():
        results = []
        for chosen in ("sdpa", kernel):
            cache, start, parts = KVCache(5, 256), np.zeros(5, np.int64), []
            for count in COUNTS:
                parts.append(feed(model, cache, sequences, start, count, chosen, "cuda"))
                start += count
            lengths = [30, 7, 100]
            whole = torch.from_numpy(np.concatenate([s[:n] for s, n in zip(sequences, lengths, strict=False)])).cuda()
            parts.append(forward_hidden(model, whole, pack_sequences(lengths, whole.device), chosen))
            results.append(torch.cat(parts).float())
    scale = results[0].abs().max()
    assert (results[0] - results[1]).abs().max() / scale < 0.03
