"""Sampling on a GPU, in Triton: noise, argmax and logsumexp in one pass over the logits.

The random bits are those of sampling.py. The logarithms are not torch's to the last bit, so all
decisions of a run should come from here.

Shape legend: T positions to sample, V vocabulary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.sampling import Noise

# Whether the compiler contracts a * b + c decides bits, and its default differs by version.
FUSED = {"enable_fp_fusion": True}
LOGITS = 4096  # of a block


class Sampled(NamedTuple):
    """The tokens of T positions, and what their log-probabilities follow from."""

    best: torch.Tensor  # float32 [T], largest logit with noise
    token: torch.Tensor  # int64 [T], its token
    chosen: torch.Tensor  # float32 [T], the token's logit without noise
    total: torch.Tensor  # float32 [T], logsumexp of all logits without noise


def sample(
    logits: torch.Tensor,
    keys: torch.Tensor,
    *,
    inverse_temperature: float = 1.0,
    is_greedy: bool = False,
    first: int = 0,
    seed: int | None = None,
) -> Sampled:
    """Sample one token for each of T positions from logits [T, V], times inverse_temperature.

    keys: int32 [T, 4] of the noise streams, see sampling.py; with a seed, their Philox counters;
    first: token id of the first column."""
    assert logits.stride(1) == 1 and keys.is_contiguous()
    num_positions, size = logits.shape
    blocks = triton.cdiv(size, LOGITS)
    device = logits.device
    columns = torch.empty(num_positions, blocks, dtype=torch.int32, device=device)
    parts = torch.empty(3, num_positions, blocks, dtype=torch.float32, device=device)
    best, chosen, total = torch.empty(3, num_positions, dtype=torch.float32, device=device)
    token = torch.empty(num_positions, dtype=torch.int64, device=device)
    words = [_signed(0 if seed is None else seed >> shift) for shift in (0, 32)]
    _sample_blocks[(num_positions, blocks)](
        logits, keys, columns, parts, size, logits.stride(0), inverse_temperature, first, *words,
        HAS_NOISE=not is_greedy, HAS_SEED=seed is not None, BLOCK=LOGITS, num_warps=8, **FUSED,
    )  # fmt: skip
    _sample_rows[(num_positions,)](
        logits, columns, parts, best, token, chosen, total, size, blocks, logits.stride(0),
        inverse_temperature, first, BLOCK=triton.next_power_of_2(blocks), num_warps=1, **FUSED,
    )  # fmt: skip
    return Sampled(best, token, chosen, total)


def draw(
    logits: torch.Tensor, noise: Noise, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample as `sampling.sample` does where no token is barred, in one pass over the logits."""
    is_greedy = params.temperature == 0.0
    factor = 1.0 if is_greedy else 1.0 / params.temperature
    found = sample(
        logits,
        noise.words.contiguous(),
        inverse_temperature=factor,
        is_greedy=is_greedy,
        seed=noise.seed,
    )
    logprob = found.chosen - found.total
    return found.token, torch.zeros_like(logprob) if is_greedy else logprob


def best_and_sum(
    logits: torch.Tensor,
    keys: torch.Tensor,
    first: int = 0,
    is_greedy: bool = False,
    seed: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `sampling.best_and_sum`; with a seed, keys are counters."""
    keys = keys.contiguous()
    found = sample(logits.contiguous(), keys, first=first, is_greedy=is_greedy, seed=seed)
    return found.best, found.token - first, found.total


def _signed(word: int) -> int:
    """Return the int32 with the bits of a number's last 32."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@triton.jit(do_not_specialize=["first", "seed_low", "seed_high"])
def _sample_blocks(
    logits_ptr, keys_ptr, columns_ptr, parts_ptr, size, row_stride, inverse_temperature, first,
    seed_low, seed_high, HAS_NOISE: tl.constexpr, HAS_SEED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find a block's largest logit with noise, and its largest and sum of exponentials without."""
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = logits_ptr + row.to(tl.int64) * row_stride + column
    logit = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
    noisy = logit
    if HAS_NOISE:
        key0, key1, key2, key3 = _stream_key(keys_ptr + row * 4, seed_low, seed_high, HAS_SEED)
        noisy -= _log_exponential(_random_bits(first + column, key0, key1, key2, key3))
    best, index = tl.max(noisy, 0, return_indices=True)  # the first of equal ones
    top = tl.max(logit, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    target = row * blocks + block
    parts = tl.num_programs(0) * blocks
    tl.store(columns_ptr + target, block * BLOCK + index)
    tl.store(parts_ptr + target, best)
    tl.store(parts_ptr + parts + target, top)
    tl.store(parts_ptr + 2 * parts + target, tl.sum(tl.exp(logit - base), 0))


@triton.jit(do_not_specialize=["first"])
def _sample_rows(
    logits_ptr, columns_ptr, parts_ptr, best_ptr, token_ptr, chosen_ptr, total_ptr, size, blocks,
    row_stride, inverse_temperature, first, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce the blocks of one position."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    inside = block < blocks
    source = parts_ptr + row * blocks + block
    parts = tl.num_programs(0) * blocks
    noisy = tl.load(source, mask=inside, other=float("-inf"))
    best, index = tl.max(noisy, 0, return_indices=True)
    # Of logits that are not numbers any block and column may be the best, also behind the last.
    index = tl.minimum(index, blocks - 1)
    column = tl.minimum(tl.load(columns_ptr + row * blocks + index), size - 1)
    tops = tl.load(source + parts, mask=inside, other=float("-inf"))
    sums = tl.load(source + 2 * parts, mask=inside, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    chosen = tl.load(logits_ptr + row.to(tl.int64) * row_stride + column).to(tl.float32)
    token = (first + column).to(tl.int64)
    tl.store(best_ptr + row, best)
    tl.store(token_ptr + row, token)
    tl.store(chosen_ptr + row, chosen * inverse_temperature)
    tl.store(total_ptr + row, base + tl.log(tl.sum(sums * tl.exp(tops - base), 0)))


@triton.jit
def _stream_key(words_ptr, seed_low, seed_high, HAS_SEED: tl.constexpr):
    """Load a key, four uint32; with a seed, compute it as `philox4x32` does."""
    word0 = tl.load(words_ptr).to(tl.uint32, bitcast=True)
    word1 = tl.load(words_ptr + 1).to(tl.uint32, bitcast=True)
    word2 = tl.load(words_ptr + 2).to(tl.uint32, bitcast=True)
    word3 = tl.load(words_ptr + 3).to(tl.uint32, bitcast=True)
    if HAS_SEED:
        key0 = seed_low.to(tl.uint32, bitcast=True)
        key1 = seed_high.to(tl.uint32, bitcast=True)
        factor0 = tl.full([], 0xD2511F53, tl.uint32)
        factor1 = tl.full([], 0xCD9E8D57, tl.uint32)
        for _ in tl.static_range(10):
            new0 = tl.umulhi(word2, factor1) ^ word1 ^ key0
            new2 = tl.umulhi(word0, factor0) ^ word3 ^ key1
            word0, word1, word2, word3 = new0, word2 * factor1, new2, word0 * factor0
            key0 += 0x9E3779B9
            key1 += 0xBB67AE85
    return word0, word1, word2, word3


@triton.jit
def _random_bits(token, key0, key1, key2, key3):
    """Compute the bits of `random_bits`, int32."""
    x = token.to(tl.uint32, bitcast=True) + key0
    x = (x ^ (x >> 17)) * 0xED5AD4BB + key1
    x = (x ^ (x >> 11)) * 0xAC4C1B51 + key2
    x = (x ^ (x >> 15)) * 0x31848BAB + key3
    return ((x ^ (x >> 14)) & 0x7FFFFFFF).to(tl.int32, bitcast=True)


@triton.jit
def _log_exponential(bits):
    """Compute the logarithm of -log(1 - u), u = (bits + 0.5) / 2^31.

    Small u win, so they need their full relative precision."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    octave, rest = _octave(1.0 - u)
    return _log(-_log1p(octave, tl.where(octave == 0.0, -u, rest)))


@triton.jit
def _log(x):
    """Compute log(x) of normal positive numbers, with half of the instructions of tl.log."""
    octave, rest = _octave(x)
    return _log1p(octave, rest)


@triton.jit
def _octave(x):
    """Split x = 2^octave * (1 + rest), 1 + rest in [2/3, 4/3)."""
    bits = x.to(tl.int32, bitcast=True)
    shift = (bits - 0x3F2AAAAB) & -0x800000
    rest = (bits - shift).to(tl.float32, bitcast=True) - 1.0
    return shift.to(tl.float32) * 1.1920928955078125e-07, rest


@triton.jit
def _log1p(octave, x):
    """Compute octave * log(2) + log(1 + x), by a polynomial fitted on [-1/3, 1/3]."""
    q = 0.14026251 * x - 0.15388559
    q = q * x + 0.13995828
    q = q * x - 0.16415957
    q = q * x + 0.20011167
    q = q * x - 0.2500782
    q = q * x + 0.33333197
    q = q * x - 0.49999937
    return octave * 0.6931471805599453 + (x + x * x * q)
