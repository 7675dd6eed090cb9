"""From logits to tokens: Gumbel-max with counter-based noise, the same for any batch or rank.

argmax_v(log p_v + g_v) with standard Gumbel g is an exact sample of p (Gumbel 1954; Maddison et al.
2014, "A* sampling"). So a token is a pure function of its logits and its noise key.

A draft token x is accepted while it is the token y that the row samples there, with the noise that
sampling without drafts would use. So the draft cannot change y at all, and drafts may be selected
by their content, which the usual rejection rule does not allow (notebooks/exactness.ipynb). A draft
with the same noise under nearby weights q is nearly always accepted: the chance of y = x is at
least (1 - TV) / (1 + TV), with TV the total variation distance of q and the policy (Daliri, Musco
and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding").

Noise has two layers. Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
3") turns the 128-bit counter (prompt_id, draw_index, sample, position) into a 128-bit stream key.
Philox is a bijection of its counter, so two different counters never share a stream. Then a 32-bit
integer mixer, keyed by those four words, turns each token id into 31 random bits. Philox for every
vocabulary entry would cost 3.5 times as many operations. All devices have the same bits.

Shape legend: N streams, T positions to sample, V vocabulary, C candidates.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from bubblespec.engine.arrays import to_device, to_host
from bubblespec.engine.batch import SamplerOutput, SamplingParams

MAX_POSITIONS = 1 << 20
MAX_SAMPLES = 1 << 12
EVALUATION = 1 << 31  # the visit of held-out prompts: evaluation shares no stream with training

# triple32 of Chris Wellons' hash-prospector (github.com/skeeto/hash-prospector): xorshift-multiply
# rounds with bias near that of a random function. The key words added between the rounds are ours.
_MIXER = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = 14
# Multipliers of Philox4x32 and what it adds to its key in each round.
_PHILOX, _WEYL, _LOW = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF
# Positions are sampled in chunks of about this many logits: small enough for a processor's cache,
# large enough for a GPU.
MAX_LOGITS_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 26}


class Noise(NamedTuple):
    """The noise streams of T positions."""

    words: torch.Tensor  # int32 [T, 4], keys; with a seed the counters that they follow from
    seed: int | None = None


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Compute ten rounds of Philox4x32, uint32 [N, 4], of counters uint32 [N, 4]."""
    low_bits, shift = np.uint64(_LOW), np.uint64(32)
    words = counter.T.astype(np.uint64)
    even, odd = words[0::2], words[1::2]
    multiplier = np.array(_PHILOX, np.uint64)[:, None]
    for i in range(10):
        product = even * multiplier
        round_key = [(word + i * step) & _LOW for word, step in zip(key, _WEYL, strict=True)]
        key_words = np.array(round_key, np.uint64)[:, None]
        even = (product >> shift)[::-1] ^ odd ^ key_words
        odd = (product & low_bits)[::-1]
    return np.stack((even, odd), axis=1).reshape(4, -1).T.astype(np.uint32)


def stream_counters(
    prompt_id: np.ndarray, draw_index: np.ndarray, sample: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Return the counters of N noise streams, uint32 [N, 4].

    prompt_id, draw_index, sample, position: int64 [N], disjoint bits of the counter (64, 32, 12 and
    20), so no two streams of a run share a key; position counts response tokens from 0."""
    counter = np.empty((len(prompt_id), 4), dtype=np.uint32)
    prompt_id = prompt_id.astype(np.uint64)
    counter[:, 0] = (sample << 20) | position
    counter[:, 1] = draw_index
    counter[:, 2] = prompt_id & np.uint64(0xFFFFFFFF)
    counter[:, 3] = prompt_id >> np.uint64(32)
    return counter


def stream_keys(seed: int, *of: np.ndarray) -> np.ndarray:
    """Compute the 128-bit keys of N noise streams, int32 [N, 4]; of: see `stream_counters`."""
    return philox4x32(stream_counters(*of), _halves(seed)).view(np.int32)


def _halves(seed: int) -> tuple[int, int]:
    return seed & _LOW, (seed >> 32) & _LOW


def keys_of(counters: torch.Tensor, seed: int) -> torch.Tensor:
    """Compute keys of noise streams, int32 [N, 4], from counters like these, as `stream_keys` does.

    With integers of 64 bits, whose products wrap around as unsigned ones do."""
    word0, word1, word2, word3 = (counters.long() & _LOW).unbind(1)
    for i in range(10):
        key0, key1 = (
            (word + i * step) & _LOW for word, step in zip(_halves(seed), _WEYL, strict=True)
        )
        product0, product1 = word0 * _PHILOX[0], word2 * _PHILOX[1]
        word0, word1 = ((product1 >> 32) & _LOW) ^ word1 ^ key0, product1 & _LOW
        word2, word3 = ((product0 >> 32) & _LOW) ^ word3 ^ key1, product0 & _LOW
    return torch.stack((word0, word1, word2, word3), 1).int()


def random_bits(keys: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Compute 31 random bits per stream and token, int32 [N, V], in integer arithmetic only.

    keys: int32 [N, 4]; tokens: ids int32 [V], or V for all from 0."""
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, dtype=torch.int32, device=keys.device)
    x = tokens + keys[:, :1]
    for i, (shift, multiplier) in enumerate(_MIXER):
        _xorshift_(x, shift)
        torch.add(keys[:, i + 1, None], x, alpha=multiplier - (multiplier >> 31 << 32), out=x)
    return _xorshift_(x, _LAST_SHIFT).bitwise_and_(0x7FFFFFFF)


def gumbel(
    keys: torch.Tensor, tokens: int | torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Compute standard Gumbel noise [N, V]; keys, tokens: see `random_bits`."""
    return _log_exponential(keys, tokens, dtype).neg_()


def add_gumbel(
    logits: torch.Tensor, keys: torch.Tensor, tokens: int | torch.Tensor
) -> torch.Tensor:
    """Add Gumbel noise to logits [N, V], in their dtype; keys, tokens: see `random_bits`."""
    return logits - _log_exponential(keys, tokens, logits.dtype)


def _log_exponential(
    keys: torch.Tensor, tokens: int | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute logarithms of standard exponential noise, Gumbel noise with the other sign.

    -log(-log(1 - u)), u uniform in (0, 1), has the Gumbel distribution exp(-exp(-g)). log1p keeps
    full relative precision for small u, which is where the winners come from."""
    minus_u = random_bits(keys, tokens).to(dtype).add_(0.5).mul_(-(2.0**-31))
    minus_u.clamp_(min=2.0**-24 - 1.0)
    return minus_u.log1p_().neg_().log_()


def _xorshift_(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Compute x ^= x >> shift; the mask makes torch's arithmetic shift a logical one."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def best_and_sum(
    logits: torch.Tensor,
    keys: torch.Tensor,
    first: int = 0,
    is_greedy: bool = False,
    seed: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest of logits [T, V] with noise, its index, and logsumexp without noise, [T].

    keys: int32 [T, 4], see `Noise`; first: id of the first token, see `random_bits`; is_greedy:
    without noise. 28 passes over the logits; triton_ops.py has it in one."""
    logits = widen(logits)
    if seed is not None and not is_greedy:
        keys = keys_of(keys, seed)
    ids = torch.arange(first, first + logits.shape[1], dtype=torch.int32, device=logits.device)
    best, index = (logits if is_greedy else add_gumbel(logits, keys, ids)).max(-1)
    return best, index, logits.logsumexp(-1)


def sample(
    logits: torch.Tensor,
    keys: torch.Tensor,
    num_generated: torch.Tensor,
    params: SamplingParams,
    reduce: Callable = best_and_sum,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token for each of T positions.

    logits: [T, V]; keys: int32 [T, 4], noise streams; num_generated: int64 [T], response tokens
    before this one. Returns token int64 [T] and its log-probability, float [T], under the
    distribution that it was drawn from: 0 when greedy."""
    _, token, chosen, total = reduce_chunks(logits, keys, num_generated, params, reduce)
    return token, torch.zeros_like(chosen) if params.temperature == 0.0 else chosen - total


def reduce_chunks(
    logits: torch.Tensor, keys, num_generated, params: SamplingParams, reduce: Callable, first=0
) -> tuple[torch.Tensor, ...]:
    """Compute what sampling reads of T positions, [T] each, in chunks of MAX_LOGITS_AT_ONCE.

    Returns the largest logit with noise, its index, its logit without noise, and the logarithm of
    the sum of exponentials of allowed logits."""
    rows = max(1, MAX_LOGITS_AT_ONCE[logits.device.type] // logits.shape[1])
    chunks = zip(*(t.split(rows) for t in (logits, keys, num_generated)), strict=True)
    parts = [_reduce_chunk(one, key, num, params, reduce, first) for one, key, num in chunks]
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _reduce_chunk(logits, keys, num_generated, params: SamplingParams, reduce: Callable, first):
    logits, allowed = scale_and_restrict(logits, num_generated, params)
    best, index, total = reduce(allowed, keys, first, params.temperature == 0.0)
    return best, index, widen(logits.gather(-1, index[:, None])[:, 0]), total


def widen(logits: torch.Tensor) -> torch.Tensor:
    """Convert logits to at least float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def scale_and_restrict(
    logits: torch.Tensor, num_generated, params: SamplingParams, ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [T, V] divided by the temperature, and the same with barred tokens at -inf.

    ids: see `restrict`. Both are the given logits where nothing changes."""
    if params.temperature not in (0.0, 1.0):
        logits = widen(logits) / params.temperature
    if params.truncates:
        logits = widen(logits)
    return logits, restrict(logits, num_generated, params, ids)


def restrict(
    logits: torch.Tensor, num_generated, params: SamplingParams, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Set barred tokens of logits [T, V], divided by the temperature, to -inf.

    Barred are early stop tokens, then all but the top_k, then all outside the nucleus (the smallest
    set of best tokens with probability at least top_p). ids: [V] or [T, V], the tokens that the
    logits are of; None: all tokens."""
    if params.stop_token_ids and params.min_length > 0:
        too_early = (num_generated < params.min_length)[:, None]
        stop = to_device(np.array(params.stop_token_ids), logits.device)
        if ids is None:
            bars = logits[:, stop].masked_fill(too_early, float("-inf"))
            logits = logits.index_copy(1, stop, bars)
        else:
            logits = logits.masked_fill(torch.isin(ids, stop) & too_early, float("-inf"))
    if 0 < params.top_k < logits.shape[1]:
        threshold = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if params.top_p < 1.0:
        ordered, index = logits.sort(descending=True, stable=True)
        probability = ordered.softmax(-1)
        is_dropped = probability.cumsum(-1) - probability >= params.top_p
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, index, is_dropped)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits


def kept_tokens(
    logits: torch.Tensor, target: torch.Tensor, num_generated: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """Return which tokens sampling keeps, bool [T, V], and the target of each position in any case.

    logits: [T, V], divided by the temperature; target: int64 [T], what was sampled there, by
    earlier weights or by logits that were rounded otherwise; num_generated: see `sample`."""
    kept = restrict(logits, num_generated, params) != float("-inf")  # True where it is no number
    return kept.scatter_(1, target[:, None], True)


def draw_among(
    logits: torch.Tensor,
    ids: torch.Tensor,
    keys: torch.Tensor,
    num_generated: torch.Tensor,
    params: SamplingParams,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from C of all tokens with a position's noise, int64 [T], as `sample` does from all.

    Also return by how much the token wins against the second, float [T]. logits: [T, C]; ids: [C]
    or [T, C], their tokens; keys, num_generated: see `sample`."""
    _, allowed = scale_and_restrict(logits, num_generated, params, ids)
    if params.temperature > 0.0:
        allowed = add_gumbel(allowed, keys, ids.int())
    best = allowed.topk(2)
    token = ids.expand(logits.shape).gather(-1, best.indices[:, :1])
    return token[:, 0], best.values[:, 0] - best.values[:, 1]


def read(sampled: tuple[torch.Tensor, torch.Tensor]) -> SamplerOutput:
    """Return what `sample` returned, [T] each; the host waits once."""
    token, logprob = to_host(*sampled)
    return SamplerOutput(token.astype(np.int64, copy=False), logprob)


def drawn(wait: Callable[[], np.ndarray]) -> SamplerOutput:
    """Return the same from a call that returns it as one array, float64 [2, T]."""
    token, logprob = wait()
    return SamplerOutput(token.astype(np.int64), logprob)
