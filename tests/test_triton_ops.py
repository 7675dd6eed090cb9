"""The operations in Triton against plain formulas: on a GPU, or on a CPU in triton's interpreter
(conftest.py). The interpreter shows neither races nor missing barriers."""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.kv_cache import SPLIT, KVCache, LayerCache, pack_rows
from bubblespec.engine.ops import torch_ops
from bubblespec.engine.ops.softmax import AttentionOptions
from bubblespec.engine.ops.view import TILE, AttentionMetadata, Norm
from bubblespec.engine.sampling import Noise, add_gumbel, random_bits, sample, stream_keys

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from bubblespec.engine.ops import triton_ops, triton_sampling  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    DEVICE, DTYPE, TOLERANCE = "cpu", torch.float32, 2e-5
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered")
else:
    DEVICE, DTYPE, TOLERANCE = "cuda", torch.bfloat16, 2e-2
    has_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    pytestmark = [pytest.mark.gpu, has_gpu]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype)


def int32(values) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(DEVICE)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def make_view(sequences, page: int, split: int, max_q: int = 0) -> AttentionMetadata:
    """sequences: (slot, new tokens, keys) of each. Pages of rows are in a random order."""
    slot, count, used = np.array(sequences).T
    pages = -(-int(used.max()) // page)
    table = torch.randperm((slot.max() + 2) * pages).view(-1, pages)
    spare = torch.full((len(table), 1), table.numel())
    token = np.arange(len(slot)).repeat(count)
    first = np.append(0, count.cumsum())
    position = used[token] - count[token] + np.arange(len(token)) - first[token]
    place = table[slot[token], position // page] * page + torch.from_numpy(position % page)
    vectors = (int32(vector) for vector in (position, first, slot))
    table = int32(torch.cat((table, spare), 1))
    max_q = max_q or int(count.max())
    return AttentionMetadata(place.to(DEVICE), *vectors, table, max_q, int(used.max()), split)


def per_sequence(view: AttentionMetadata, values: torch.Tensor) -> list[torch.Tensor]:
    """Split [N] by sequences."""
    return list(values[: view.first[-1]].split(view.first.diff().tolist()))


def make_cache(view: AttentionMetadata, page: int, heads: int, size: int, value_size: int = 0):
    """Keys and values of the middle one of three layers; NaN where no sequence has keys."""
    pages, sizes = int(view.table.max()) + 1, (size, value_size or size)
    flat = torch.full((pages, 3, heads * page * sum(sizes)), math.nan, dtype=DTYPE, device=DEVICE)
    keys, values = (
        part.view(pages, 3, heads, page, of)
        for part, of in zip(flat.split([heads * page * of for of in sizes], -1), sizes, strict=True)
    )
    ends = [int(of.max()) + 1 if len(of) else 0 for of in per_sequence(view, view.position)]
    for slot, used in zip(view.slot.tolist(), ends, strict=True):
        for position in range(used):
            number, offset = view.table[slot, position // page].item(), position % page
            for of in (keys, values):
                of[number, :, :, offset] = randn(3, heads, of.shape[-1])
    return [of[:, 1].transpose(1, 2) for of in (keys, values)]


def attend(query, keys, values, view: AttentionMetadata, options: AttentionOptions):
    packing, cache = SimpleNamespace(view=view), LayerCache(keys, values, None)
    return triton_ops.attend(query, packing, cache, options)


def plain_attention(query, keys, values, view: AttentionMetadata, options: AttentionOptions):
    scaling, window, cap, sinks, chunk = options
    out, group = [], query.shape[1] // keys.shape[2]
    sequences = np.arange(len(view.slot)).repeat(view.first.diff().cpu().numpy())
    for token, position in enumerate(view.position.tolist()):
        row = view.table[view.slot[sequences[token]].item(), :-1].long()
        first = max(position + 1 - window, 0) if window else 0
        first = max(first, position - position % chunk) if chunk else first
        key, value = (
            cache[row].flatten(0, 1)[first : position + 1].double().repeat_interleave(group, 1)
            for cache in (keys, values)
        )
        score = torch.einsum("hd,khd->hk", query[token].double(), key) * scaling
        score = score if cap is None else cap * (score / cap).tanh()
        weight = score.exp()
        total = weight.sum(-1) + (0 if sinks is None else sinks.double().exp())
        out.append(torch.einsum("hk,khd->hd", weight / total[:, None], value))
    return torch.stack(out)


@pytest.mark.parametrize(
    "group, size, page, split, window, sequences",
    [  # a slot twice: a long row in two pieces; no new tokens: a sequence that is left out
        (1, 64, 64, 64, None, [(1, 1, 130), (0, 0, 5), (2, 1, 1)]),
        (3, 80, 32, 32, None, [(0, 4, 70), (1, 1, 33)]),
        (4, 96, 48, 48, 20, [(0, 3, 120), (2, 0, 0), (1, 2, 2)]),
        (6, 128, 16, 64, None, [(0, 2, 65), (1, 1, 9)]),
        (7, 128, 128, 128, None, [(0, 9, 130), (0, 5, 135), (1, 2, 40)]),
        (8, 256, 64, 64, 65, [(0, 2, 129), (1, 1, 20)]),
        (1, 16, 16, 16, 3, [(0, 16, 40), (1, 2, 90)]),
        (2, 24, 16, 16, None, [(0, 1, 200), (1, 3, 3)]),
        # Values of another size.
        (1, (192, 128), 64, 64, None, [(0, 9, 70), (1, 1, 33)]),
        (2, (24, 16), 16, 32, 20, [(0, 5, 60), (1, 1, 3)]),
        (3, (16, 40), 16, 16, None, [(0, 2, 10), (1, 1, 16)]),
        # More rows than a tile has: of one token, and of a piece of a prompt.
        (71, 16, 16, 32, None, [(0, 2, 40), (1, 0, 7), (2, 1, 3)]),
        (128, 16, 16, 16, 5, [(0, 1, 40), (1, 1, 1)]),
        (5, 16, 16, 32, None, [(0, 40, 70), (1, 1, 9)]),
        (16, 16, 16, 16, 20, [(0, 11, 50), (1, 1, 20)]),
    ],
)
def test_attend_equals_plain_attention(group, size, page, split, window, sequences):
    size, value_size = size if isinstance(size, tuple) else (size, size)
    view = make_view(sequences, page, split)
    keys, values = make_cache(view, page, 2, size, value_size)
    query = randn(2 * group, len(view.place), size).transpose(0, 1)
    given = query, keys, values, view, AttentionOptions(size**-0.5, window)
    assert_near(attend(*given), plain_attention(*given))


ROWS = [(0, 3, 66), (2, 0, 0), (1, 2, 33), (3, 12, 40), (4, 1, 1), (5, 1, 64)]


@pytest.mark.parametrize(
    "split, window, chunk, cap, sink",
    [
        (16, None, 32, None, 0.0),
        (128, None, 24, 0.7, None),
        (16, None, 24, 0.7, 0.0),
        (128, None, 32, None, 0.0),
        (16, 20, None, 3.0, -90.0),
        (128, None, None, None, 90.0),
    ],
)
def test_attend_with_cap_sinks_and_chunks_equals_plain(split, window, chunk, cap, sink):
    """Chunks that begin at a block of keys and elsewhere; sinks of no weight and of all."""
    view = make_view(ROWS, 16, split)
    keys, values = make_cache(view, 16, 2, 16)
    query = randn(6, len(view.place), 16).transpose(0, 1)
    sinks = None if sink is None else sink + randn(6)
    options = AttentionOptions(0.4, window, cap, sinks, chunk)
    given = query, keys, values, view, options
    found, wanted = attend(*given), plain_attention(*given)
    assert_near(found, wanted)
    for name in ("cap", "chunk", "sinks"):
        if getattr(options, name) is not None and sink in (None, 0.0):
            other = plain_attention(*given[:4], options._replace(**{name: None}))
            assert (other - wanted).abs().max() > 0.05, name


def test_attended_bits_do_not_depend_on_other_rows():
    view = make_view([(0, 2, 30), (1, 1, 100)], 32, 32)
    keys, values = make_cache(view, 32, 1, 16)
    query = randn(3, 2, 16)
    options = AttentionOptions(0.25)
    both = attend(query, keys, values, view, options)
    only = view._replace(first=view.first[:2], slot=view.slot[:1], max_keys=32)
    alone = attend(query[:2], keys, values, only, options)
    assert torch.equal(both[:2], alone)


def test_attended_bits_do_not_depend_on_the_cut_of_rows():
    """A piece of a prompt in several tiles, and cut as graphs cut it."""
    whole, cut = [(0, 50, 90)], [(0, 21, 61), (0, 21, 82), (0, 8, 90)]
    views = [make_view(whole, 32, 32), make_view(cut, 32, 32)]
    views[1] = views[1]._replace(table=views[0].table, place=views[0].place)
    keys, values = make_cache(views[0], 32, 1, 16)
    query = randn(50, 3, 16)
    for window, chunk in ((None, None), (30, None), (None, 40)):
        options = AttentionOptions(0.25, window, 5.0, randn(3), chunk)
        together, apart = (attend(query, keys, values, of, options) for of in views)
        # numpy's products round by a row's place.
        assert_near(together, apart, 1e-6 if DEVICE == "cpu" else 0.0)


def test_attention_reads_nothing_behind_the_tokens_fed():
    """Tokens of a draft that are not fed have position 0; nothing has written their keys."""
    view = make_view([(0, 3, 20), (1, 2, 18)], 16, 16)
    keys, values = make_cache(view, 16, 2, 16)  # NaN elsewhere
    for token, place in enumerate(view.place.tolist()):
        if token in (2, 4):
            keys[place // 16, place % 16] = values[place // 16, place % 16] = math.nan
    view.position[2] = view.position[4] = 0
    query = randn(5, 4, 16)
    for window in (None, 5):
        found, wanted = (
            of(query, keys, values, view, AttentionOptions(0.25, window))[[0, 1, 3]]
            for of in (attend, plain_attention)
        )
        assert_near(found, wanted)


# Bytes of shared memory that Triton 3.9 reports for sm_80, with 1, 2 and 3 stages.
COMPILED = {  # widths of keys and values, rows
    (64, 64, 16): (12_288, 20_480, 36_864),
    (64, 64, 64): (16_384, 24_576, 40_960),
    (128, 128, 16): (22_528, 38_912, 71_680),
    (128, 128, 32): (28_672, 45_056, 77_824),
    (128, 128, 64): (40_960, 57_344, 90_112),
    (256, 256, 16): (25_600, 41_984, 74_752),
    (256, 256, 32): (34_816, 51_200, 83_968),
    (256, 256, 64): (53_248, 69_632, 102_400),
}


@pytest.mark.parametrize("limit", [65_536, 101_376, 166_912, 232_448])
def test_tiles_fit_the_shared_memory_of_any_card(limit):
    for (*widths, rows), size in COMPILED.items():
        keys, _, num_stages = triton_ops.tiling(*widths, rows, limit)
        assert size[num_stages - 1] <= limit and num_stages >= 1 + (limit > 65_536)
        assert num_stages == 3 or size[num_stages] > limit
        assert keys == triton_ops.tiling(*widths, 16, 1 << 20)[0], "of which a token's bits depend"


def norm_of(weight: torch.Tensor, eps: float = 1e-3, has_offset: bool = False) -> Norm:
    return Norm(weight, eps, torch.tensor(eps), has_offset)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [N, heads, D]; cos, sin: [N, R / 2]."""
    half = cos.shape[1]
    low, high, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


@pytest.mark.parametrize(
    "heads, kv_heads, size, rotary, has_norms, has_offset",
    [
        (4, 2, 16, 16, False, False),
        (3, 1, 24, 12, True, True),
        (14, 2, 64, 64, True, False),
        (2, 2, 80, 0, False, False),
    ],
)
def test_rope_store_rotates_and_stores(heads, kv_heads, size, rotary, has_norms, has_offset):
    view = make_view([(0, 2, 40), (1, 1, 3)], 16, 16)
    keys, values = make_cache(view, 16, kv_heads, size)
    place = view.place.long()
    page, offset = place // 16, place % 16
    keys[page, offset] = values[page, offset] = math.nan  # the rest must stay
    before = keys.clone(), values.clone()
    wide = randn(3, (heads + 2 * kv_heads) * size + 5)
    qkv = wide[:, :-5]
    cos, sin = (randn(50, rotary // 2, dtype=torch.float32) for _ in range(2))
    norms = None
    if has_norms:
        norms = tuple(norm_of(randn(size), has_offset=has_offset) for _ in "qk")
    packing, cache = SimpleNamespace(view=view), LayerCache(keys, values, None)
    tables = triton_ops.rotation((cos, sin), packing) if rotary else None
    query = triton_ops.rope_store(
        qkv.unflatten(1, (-1, size)), packing, cache, tables, head_norms=norms
    )
    parts = qkv.double().unflatten(1, (-1, size)).split((heads, kv_heads, kv_heads), 1)
    tables = (table.double()[view.position.long()] for table in (cos, sin))
    cos, sin = tables
    wanted = []
    for number, part in enumerate(parts[:2]):
        if norms is not None:
            part = part / (part.square().mean(-1, keepdim=True) + 1e-3).sqrt()
            part = part * (norms[number].weight.double() + has_offset)
        wanted.append(rotate(part, cos, sin))
    assert_near(query, wanted[0])
    assert_near(keys[page, offset], wanted[1])
    assert torch.equal(values[page, offset].double(), parts[2])
    keys[page, offset] = values[page, offset] = math.nan
    for cache, old in zip((keys, values), before, strict=True):
        assert torch.equal(cache.nan_to_num(9.0), old.nan_to_num(9.0))


@pytest.mark.parametrize("has_x", [False, True])
def test_add_norm_rounds_where_transformers_rounds(has_x):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    dtype = torch.float16 if DEVICE == "cpu" else DTYPE
    x, residual = randn(3, 300, dtype=dtype), randn(3, 300, dtype=dtype)
    norm = LlamaRMSNorm(300, eps=1e-2).to(DEVICE, dtype)
    norm.weight.data = randn(300, dtype=dtype)
    total = x + residual if has_x else residual.clone()
    out = triton_ops.add_norm(x if has_x else None, residual, norm_of(norm.weight, 1e-2))
    assert torch.equal(residual, total)
    wanted = norm(total)
    assert_near(out, wanted, torch.finfo(dtype).eps)
    # Rounded once, a third would differ.
    assert (out == wanted).float().mean() > 0.95


def test_norm_with_offset_is_rounded_once():
    dtype = torch.float16 if DEVICE == "cpu" else DTYPE
    x, norm = randn(9, 300, dtype=dtype), norm_of(randn(300, dtype=dtype), 1e-2, has_offset=True)
    size = (x.double().square().mean(-1, keepdim=True) + 1e-2).sqrt()
    wanted = (x.double() / size * (1 + norm.weight.double())).to(dtype)
    found = triton_ops.add_norm(None, x.clone(), norm)
    assert (found == wanted).double().mean() > 0.999
    assert torch.equal(found, triton_ops.add_norm(torch.zeros_like(x), x, norm))


@pytest.mark.parametrize("has_offset", [False, True])
def test_gated_norm_equals_torch(has_offset):
    x, wide, norm = randn(3, 5, 24), randn(3, 130), norm_of(randn(24), has_offset=has_offset)
    gate = wide[:, 10:].unflatten(1, (5, 24))
    wanted = torch_ops.gated_norm(x, gate, norm._replace(epsilon=norm.epsilon.to(DEVICE)))
    assert_near(triton_ops.gated_norm(x, gate, norm), wanted)


def test_rates_equal_torch():
    a, b = (20 * randn(3, 17)).split((6, 11), 1)
    given = a, b[:, 5:], randn(6), randn(6), 2.0
    assert_near(triton_ops.rates(*given), torch_ops.rates(*given))


ACTS = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


@pytest.mark.parametrize("act", ACTS)
def test_gated_equals_torch(act):
    gate_up = randn(2, 2 * 1030) * 4
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -1e-3])
    gate, up = gate_up.double().chunk(2, 1)
    assert_near(triton_ops.gated(gate_up, act), ACTS[act](gate) * up, TOLERANCE / 2)


def make_keys(number: int, seed: int = 3) -> torch.Tensor:
    return torch.from_numpy(stream_keys(seed, *counters(number))).to(DEVICE)


def counters(number: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 1 << bits, number) for bits in (63, 32, 12, 20)]


@triton.jit
def _store_key(words_ptr, out_ptr, seed_low, seed_high):
    key0, key1, key2, key3 = triton_sampling._stream_key(words_ptr, seed_low, seed_high, True)
    tl.store(out_ptr, key0.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 1, key1.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2, key2.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 3, key3.to(tl.int32, bitcast=True))


@triton.jit
def _store_bits(words_ptr, out_ptr, first):
    key0, key1, key2, key3 = triton_sampling._stream_key(words_ptr, first, first, False)
    token = first + tl.arange(0, 1024)
    bits = triton_sampling._random_bits(token, key0, key1, key2, key3)
    tl.store(out_ptr + tl.arange(0, 1024), bits)


@triton.jit
def _store_noise(bits_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, triton_sampling._log_exponential(tl.load(bits_ptr + index)))


def words_of(prompt_id, draw_index, sample, position) -> torch.Tensor:
    """Philox's counters as noise.stream_keys makes them, int32 [N, 4]."""
    words = np.stack(
        ((sample << 20) | position, draw_index, prompt_id & 0xFFFFFFFF, prompt_id >> 32), 1
    )
    return torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(DEVICE)


@pytest.mark.parametrize("seed", [0, 1 << 31, (0xDEADBEEF << 32) | 0xCAFEBABE])
def test_philox_equals_stream_keys(seed):
    words, key = words_of(*counters(2)), int32([[0] * 4] * 2)
    low, high = (triton_sampling._signed(seed >> shift) for shift in (0, 32))
    for row in range(2):
        _store_key[(1,)](words[row], key[row], low, high)
    assert torch.equal(key, make_keys(2, seed))


@pytest.mark.parametrize("first", [0, 151_000])
def test_kernels_bits_equal_random_bits(first):
    keys, bits = make_keys(1), int32([0] * 1024)
    _store_bits[(1,)](keys, bits, first)
    tokens = torch.arange(first, first + 1024, dtype=torch.int32, device=DEVICE)
    assert torch.equal(bits, random_bits(keys, tokens)[0])


def test_noise_is_precise_for_the_smallest_and_largest_bits():
    random = np.random.default_rng(0).integers(0, 1 << 31, 4096) >> np.arange(4096) % 32
    random[:4] = (1 << 31) - 1, (1 << 31) - 200, (1 << 31) // 3, (1 << 31) // 3 - 200
    bits, out = int32(random), torch.empty(4096, device=DEVICE)
    _store_noise[(1,)](bits, out, 4096)
    u = ((bits.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24).double()
    assert_near(out, (-torch.log1p(-u)).log(), 2.5e-7)


def check_sampled(sampled, logits, keys, tokens, inverse_temperature=1.0, is_greedy=False):
    """Winners are torch's, except where the two best nearly tie."""
    logits = logits.float() * inverse_temperature
    noisy = logits if is_greedy else add_gumbel(logits, keys, tokens)
    index = (sampled.token - tokens[0])[:, None]
    best = noisy.max(-1).values
    gap = best - noisy.gather(1, index)[:, 0]
    assert gap.max() < 1e-5
    assert (index[:, 0] == noisy.argmax(-1)).float().mean() >= 0.75
    assert_near(sampled.best, best, 1e-5)
    assert_near(sampled.chosen, logits.gather(1, index)[:, 0], 1e-6)
    assert_near(sampled.total, logits.logsumexp(-1), 1e-5)


@pytest.mark.parametrize("first, size, temperature", [(0, 5001, 1.0), (77, 333, 0.7)])
def test_sample_draws_what_the_noise_decides(first, size, temperature):
    wide = randn(4, size + 3) * 2
    keys = make_keys(4)
    tokens = torch.arange(first, first + size, dtype=torch.int32, device=DEVICE)
    for logits in (wide[:, :size], wide[:, 3:]):  # of which rows may begin anywhere
        how = {"inverse_temperature": 1 / temperature}
        sampled = triton_sampling.sample(logits, keys, first=first, **how)
        check_sampled(sampled, logits, keys, tokens, **how)


def test_sample_with_seed_equals_sample_with_keys():
    logits = randn(4, 500)
    by_keys = triton_sampling.sample(logits, make_keys(4, seed=1))
    by_seed = triton_sampling.sample(logits, words_of(*counters(4)), seed=1)
    for one, other in zip(by_keys, by_seed, strict=True):
        assert torch.equal(one, other)


def test_shards_of_a_vocabulary_sample_the_same():
    logits, keys = randn(4, 5001), make_keys(4)
    whole = triton_sampling.sample(logits, keys)
    shards = [
        triton_sampling.sample(logits[:, low : low + 2501], keys, first=low) for low in (0, 2501)
    ]
    best, shard = torch.stack([one.best for one in shards]).max(0)
    assert torch.equal(best, whole.best)
    token = torch.stack([one.token for one in shards]).gather(0, shard[None])[0]
    assert torch.equal(token, whole.token)


def test_greedy_ties_go_to_the_first_token():
    logits = torch.zeros(3, 9000, dtype=DTYPE, device=DEVICE)
    logits[1, [8999, 4096, 4095]] = 2.0
    logits[2, :4097] = -1.0
    sampled = triton_sampling.sample(logits, make_keys(3), is_greedy=True, inverse_temperature=0.5)
    assert sampled.token.tolist() == [0, 4095, 4097]
    assert sampled.best.tolist() == sampled.chosen.tolist() == [0.0, 1.0, 0.0]
    assert_near(sampled.total, (logits.float() / 2).logsumexp(-1), 1e-5)


def test_barred_tokens_are_never_sampled():
    keys, tokens = make_keys(4), torch.arange(9000, dtype=torch.int32, device=DEVICE)
    logits = torch.full((4, 9000), -math.inf, dtype=DTYPE, device=DEVICE)
    logits[0, 8500:8510] = 1.0  # the first two blocks are barred
    logits[1, 17] = -3.0
    logits[2] = torch.where(tokens % 2 == 0, 0.5, -math.inf)
    sampled = triton_sampling.sample(logits, keys)
    check_sampled(type(sampled)(*(v[:3] for v in sampled)), logits[:3], keys[:3], tokens)
    assert sampled.token[1] == 17 and sampled.token[2] % 2 == 0
    # With all barred: torch's answer.
    assert sampled.token[3] == 0
    assert sampled.best[3] == sampled.chosen[3] == sampled.total[3] == -math.inf


# Against torch_ops.py, with the same arguments


@pytest.mark.parametrize("fixed_q", [0, 4, TILE])
@pytest.mark.parametrize("length", [1, TILE, TILE + 1, 100])
def test_view_gives_each_token_its_own_keys(fixed_q, length):
    cache, count = KVCache(3, 128), np.array([length, 0, 2])
    cache.fixed_q = fixed_q
    packing = pack_rows(cache, np.array([5, 0, 9]), count, torch.device(DEVICE))
    view = packing.view
    width = view.first.diff().cpu()
    assert width.sum() == len(view.place) == length + 2 and 0 < width.max() <= view.max_q
    assert view.max_q == (fixed_q or min(max(length, 2), TILE))
    sequence = torch.arange(len(width)).repeat_interleave(width)
    assert view.slot.cpu()[sequence].tolist() == [0] * length + [2] * 2
    assert view.position.cpu().tolist() == [*range(5, 5 + length), 9, 10]
    assert view.max_keys == max(5 + length, 11) and view.split % SPLIT == 0


def test_sampling_of_both_files_is_the_same():
    """With keys; with a seed, keys are their counters."""
    logits, keys = randn(4, 97, dtype=torch.float32) * 2, make_keys(4)
    for is_greedy in (False, True):
        found = triton_ops.best_and_sum(logits, keys, 5, is_greedy)
        wanted = torch_ops.best_and_sum(logits, keys, 5, is_greedy)
        assert torch.equal(found[1], wanted[1])
        for one, other in zip(found, wanted, strict=True):
            assert_near(one, other, 1e-5)
        by_seed = triton_ops.best_and_sum(logits, words_of(*counters(4)), 5, is_greedy, seed=3)
        assert torch.equal(by_seed[1], found[1])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_draw_equals_the_reference_sampler(temperature):
    logits, params = randn(4, 5001, dtype=torch.float32) * 2, SamplingParams(temperature)
    position = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    wanted = sample(logits, make_keys(4), position, params)
    for noise in (Noise(make_keys(4)), Noise(words_of(*counters(4)), 3)):
        found = triton_ops.draw(logits, noise, params)
        assert torch.equal(found[0], wanted[0])
        for one, other in zip(found[1:], wanted[1:], strict=True):
            assert_near(one, other, 1e-5)
