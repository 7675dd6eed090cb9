"""From logits to tokens: Gumbel-max with keyed noise, and exact verification of drafts.

argmax_v(log p_v + g_v) with standard Gumbel g is an exact sample of p (Gumbel 1954; Maddison et al.
2014, "A* sampling"). So a token is a pure function of its logits and its noise key.

A draft token x is accepted while it is the token y that the row samples there, with the noise that
sampling without drafts would use. So the draft cannot change y at all, and drafts may be selected
by their content, which the usual rejection rule does not allow (notebooks/exactness.ipynb). A draft
with the same noise under nearby weights q is nearly always accepted: the chance of y = x is at
least (1 - TV) / (1 + TV), with TV the total variation distance of q and the policy (Daliri, Musco
and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding").

Shape legend: R rows, n draft tokens of a row, S draft tokens of all rows, T = S + R positions to
sample, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from bubblespec.engine.noise import add_gumbel
from bubblespec.engine.packing import to_device, to_host
from bubblespec.engine.ragged import ragged

# Positions are sampled in chunks of about this many logits: small enough for a processor's cache,
# large enough for a GPU.
MAX_LOGITS_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 26}


@dataclass(frozen=True)
class SamplingParams:
    """The sampled distribution, and the tokens that end a response."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # probability of the nucleus; 1 truncates nothing
    top_k: int = 0  # number of best tokens; 0 truncates nothing
    stop_token_ids: tuple[int, ...] = ()
    min_length: int = 0  # response tokens before which stop tokens are barred

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be barred."""
        has_bars = bool(self.stop_token_ids) and self.min_length > 0
        return has_bars or self.top_k > 0 or self.top_p < 1.0


class Drawn(NamedTuple):
    """Tokens drawn at T positions, on the host; what follows a wrong draft token is invalid."""

    token: np.ndarray  # int64 [T]
    logprobs: np.ndarray  # float [2, T], both log-probabilities of `sample`


def best_and_sum(
    logits: torch.Tensor, keys: torch.Tensor, first: int = 0, is_greedy: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest of logits [T, V] with noise, its index, and logsumexp without noise, [T].

    keys: int32 [T, 4]; first: id of the first token, see `random_bits`; is_greedy: without noise.
    28 passes over the logits; triton_ops.py has it in one."""
    logits = widen(logits)
    ids = torch.arange(first, first + logits.shape[1], dtype=torch.int32, device=logits.device)
    best, index = (logits if is_greedy else add_gumbel(logits, keys, ids)).max(-1)
    return best, index, logits.logsumexp(-1)


def sample(
    logits: torch.Tensor,
    keys: torch.Tensor,
    num_generated: torch.Tensor,
    params: SamplingParams,
    reduce: Callable = best_and_sum,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample one token for each of T positions.

    logits: [T, V]; keys: int32 [T, 4], noise streams; num_generated: int64 [T], response tokens
    before this one. Returns token int64 [T], and float [T] twice: its log-probability under the
    distribution it was drawn from, and under the untruncated one (softmax of logits / temperature;
    of the logits themselves when greedy)."""
    columns = reduce_chunks(logits, keys, num_generated, params, reduce)
    _, token, chosen, full_sum, allowed_sum = columns
    full_logprob = chosen - full_sum
    if params.temperature == 0.0:
        return token, torch.zeros_like(full_logprob), full_logprob
    return token, chosen - allowed_sum, full_logprob


def reduce_chunks(
    logits: torch.Tensor, keys, num_generated, params: SamplingParams, reduce: Callable, first=0
) -> tuple[torch.Tensor, ...]:
    """Compute what sampling reads of T positions, [T] each, in chunks of MAX_LOGITS_AT_ONCE.

    Returns the largest logit with noise, its index, its logit without noise, and the logarithms of
    the sums of exponentials, of all logits and of allowed ones."""
    rows = max(1, MAX_LOGITS_AT_ONCE[logits.device.type] // logits.shape[1])
    chunks = zip(*(t.split(rows) for t in (logits, keys, num_generated)), strict=True)
    parts = [_reduce_chunk(one, key, num, params, reduce, first) for one, key, num in chunks]
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _reduce_chunk(logits, keys, num_generated, params: SamplingParams, reduce: Callable, first):
    logits, allowed = scale_and_restrict(logits, num_generated, params)
    is_greedy = params.temperature == 0.0
    best, index, allowed_sum = reduce(allowed, keys, first, is_greedy)
    chosen = widen(logits.gather(-1, index[:, None])[:, 0])
    full_sum = allowed_sum if allowed is logits else logits.logsumexp(-1)
    return best, index, chosen, full_sum, allowed_sum


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


def read(sampled: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Drawn:
    """Return what `sample` returned, [T] each; the host waits once."""
    token, *logprobs = to_host(*sampled)
    return Drawn(token.astype(np.int64, copy=False), np.array(logprobs))


def drawn(wait: Callable[[], np.ndarray]) -> Drawn:
    """Return the same from a call that returns it as one array, float64 [3, T]."""
    token, *logprobs = wait()
    return Drawn(token.astype(np.int64), np.array(logprobs))


def num_accepted(token: np.ndarray, draft: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Count each row's draft tokens before the first wrong one, int64 [R].

    token: int64 [T], sampled in place of each draft token and after the last; draft: int64 [S];
    counts: int64 [R], draft tokens of each row."""
    if len(draft) == 0:
        return np.zeros(len(counts), np.int64)
    ends = (counts + 1).cumsum()
    is_wrong = np.ones(len(token), bool)  # True after each row's draft
    is_drafted = is_wrong.copy()
    is_drafted[ends - 1] = False
    is_wrong[is_drafted] = token[is_drafted] != draft
    wrong, first = is_wrong.nonzero()[0], ends - counts - 1
    return wrong[wrong.searchsorted(first)] - first


def num_gained(
    token: np.ndarray, accepted: np.ndarray, counts: np.ndarray, stops: tuple, *, limit: np.ndarray
) -> np.ndarray:
    """Count the tokens that rows gain by a verification, accepted and next ones, int64 [R].

    Rows are cut after a token in `stops`, and at `limit`, int64 [R], at least 1."""
    stop_at = np.where(is_stop(token, stops), ragged(counts + 1)[1], len(token))
    first_stop = np.minimum.reduceat(stop_at, np.cumsum(counts + 1) - (counts + 1))
    return np.minimum(np.minimum(accepted, first_stop) + 1, limit)


def is_stop(token: np.ndarray, stop_token_ids: tuple[int, ...]) -> np.ndarray:
    """Whether tokens are stop tokens, bool [T]; np.isin takes ten times as long for a few."""
    is_any = np.zeros(len(token), bool)
    for stop in stop_token_ids:
        is_any |= token == stop
    return is_any
