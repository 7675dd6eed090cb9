"""Counter-based Gumbel noise: the same numbers on every device, for any batch or rank.

Two layers. Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns
the 128-bit counter (prompt uid, visit, sample, position) into a 128-bit stream key. Philox is a
bijection of its counter, so two different counters never share a stream. Then a 32-bit integer
mixer, keyed by those four words, turns each token id into 31 random bits. Philox for every
vocabulary entry would cost 3.5 times as many operations.

Shape legend: N streams, V vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch

MAX_POSITIONS = 1 << 20
MAX_SAMPLES = 1 << 12
EVALUATION = 1 << 31  # the visit of held-out prompts: evaluation shares no stream with training

# triple32 of Chris Wellons' hash-prospector (github.com/skeeto/hash-prospector): xorshift-multiply
# rounds with bias near that of a random function. The key words added between the rounds are ours.
_MIXER = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST_SHIFT = 14


class Noise(NamedTuple):
    """The noise streams of T positions."""

    words: torch.Tensor  # int32 [T, 4], keys; with a seed the counters that they follow from
    seed: int | None = None


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Compute ten rounds of Philox4x32, uint32 [N, 4], of counters uint32 [N, 4]."""
    low_bits, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    words = counter.T.astype(np.uint64)
    even, odd = words[0::2], words[1::2]
    multiplier = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
    for i in range(10):
        product = even * multiplier
        round_key = key[0] + i * 0x9E3779B9, key[1] + i * 0xBB67AE85
        key_words = np.array([[word & 0xFFFFFFFF] for word in round_key], np.uint64)
        even = (product >> shift)[::-1] ^ odd ^ key_words
        odd = (product & low_bits)[::-1]
    return np.stack((even, odd), axis=1).reshape(4, -1).T.astype(np.uint32)


def stream_counters(
    uid: np.ndarray, visit: np.ndarray, sample: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """Return the counters of N noise streams, uint32 [N, 4].

    uid, visit, sample, position: int64 [N], disjoint bits of the counter (64, 32, 12 and 20), so no
    two streams of a run share a key; position counts response tokens from 0."""
    counter = np.empty((len(uid), 4), dtype=np.uint32)
    uid = uid.astype(np.uint64)
    counter[:, 0] = (sample << 20) | position
    counter[:, 1] = visit
    counter[:, 2] = uid & np.uint64(0xFFFFFFFF)
    counter[:, 3] = uid >> np.uint64(32)
    return counter


def stream_keys(seed: int, *of: np.ndarray) -> np.ndarray:
    """Compute the 128-bit keys of N noise streams, int32 [N, 4]; of: see `stream_counters`."""
    key = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return philox4x32(stream_counters(*of), key).view(np.int32)


def random_bits(keys: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
    """Compute 31 random bits per stream and token, int32 [N, V], in integer arithmetic only.

    keys: int32 [N, 4]; tokens: ids int32 [V], or V for all from 0."""
    if isinstance(tokens, int):
        tokens = torch.arange(tokens, dtype=torch.int32, device=keys.device)
    x = tokens + keys[:, :1]
    for i, (shift, multiplier) in enumerate(_MIXER):
        _xorshift_(x, shift)
        torch.add(keys[:, i + 1, None], x, alpha=_as_int32(multiplier), out=x)
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


def _as_int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
