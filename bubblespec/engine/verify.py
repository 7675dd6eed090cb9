"""Exact verification of draft tokens: which of them the current policy would have sampled, and what it samples after them.

Three rules, of which each gives every token exactly the law of plain sampling. p is the current policy after temperature and
truncation, x the draft token, y a token sampled from p.

coupled     accept while y = x, with y from the noise that plain sampling would use. The draft cannot change y at all. A draft
            made with the same noise under nearby weights q is nearly always right: the chance of y = x is at least
            (1 - TV) / (1 + TV) (Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant
            speculative decoding"), and TV is the total variation distance of p and q.
point_mass  the same with noise that no draft has seen, so y is independent of x: accepted with chance p(x).
rejection   accept x with chance min(1, p(x) / q(x)), else sample norm(max(p - q, 0)) (Leviathan et al. 2023, "Fast inference
            from transformers via speculative decoding", Algorithm 1; Chen et al. 2023, "Accelerating large language model
            decoding with speculative sampling", Algorithm 2). Accepted with chance 1 - TV, but needs all of q, and that x
            was drawn from q: see `verify`.

Shape legend: R rows, n draft tokens of a row, S draft tokens of all rows, T = S + R positions, V vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch

from bubblespec.engine import sampling
from bubblespec.engine.noise import gumbel, random_bits

RULES = ("coupled", "point_mass", "rejection")

# Plain sampling and drafts read a stream at the token ids, from 0. Further on, where no vocabulary reaches, each stream has:
FRESH = 1 << 29  # noise that no draft has seen, at FRESH + token id
ACCEPT = 1 << 30  # the acceptance test's one uniform


class Verified(NamedTuple):
    """accepted: int64 [R], leading draft tokens accepted. token, logprob, full_logprob: [T], see `sample`.

    With `first` a row's first position, token[first : first + accepted] are its accepted draft tokens, and the token at
    first + accepted comes next. What stands after that continues a refused token and means nothing.
    """

    accepted: torch.Tensor
    token: torch.Tensor
    logprob: torch.Tensor
    full_logprob: torch.Tensor


def verify(
    logits: torch.Tensor,
    draft: torch.Tensor,
    counts: np.ndarray,
    keys: torch.Tensor,
    num_generated: torch.Tensor,
    params: sampling.SamplingParams,
    rule: str = "coupled",
    draft_logprobs: torch.Tensor | None = None,
    selected_by_content: bool = False,
) -> Verified:
    """Verify the drafts of R rows; a row without a draft is sampled plainly, from the fresh noise under point_mass.

    logits: [T, V], rows one after the other, each with the n + 1 positions its draft's tokens and the next one are predicted
    at; draft: int64 [S]; counts: int64 [R] on the host, n of each row; keys: int32 [T, 4] and num_generated: int64 [T], of
    every position, as in `sample`; draft_logprobs: [S, V], log q, for rejection alone. No value is copied to the host.

    Length limits and stop tokens are the caller's affair: see `num_gained`. Under point_mass, a row's every token must come
    from here, or else a choice of drafts by content chooses the plain noise of the rows left without one. Under rejection,
    drafts are made with any noise but the fresh, and x is a draw from q only if the draft was not chosen by what it contains:
    with finished drafts only, x is a draw from q given an early stop, and responses come out too short. Cutting drafts by the
    clock is no such choice. Raises ValueError for such drafts, for rejection without log q, and for lengths that do not fit.
    """
    if rule not in RULES:
        raise ValueError(f"accept rule {rule!r} is none of {', '.join(RULES)}")
    if rule == "rejection" and draft_logprobs is None:
        raise ValueError("accept rule rejection needs draft_logprobs, the drafting policy's log-probability of every token")
    if rule == "rejection" and selected_by_content:
        raise ValueError("accept rule rejection is biased when drafts are selected by their content; use coupled or point_mass")
    if len(logits) != len(counts) + len(draft) or len(draft) != counts.sum():
        raise ValueError(
            f"{len(logits)} positions and {len(draft)} draft tokens do not fit {len(counts)} rows of sum {counts.sum()}"
        )
    used = _further(keys, FRESH) if rule == "point_mass" else keys
    if len(draft) == 0:  # most forwards without speculation; what follows gives the same, at a quarter of a small model's step
        return Verified(torch.zeros_like(num_generated), *sampling.sample(logits, used, num_generated, params))
    last = np.cumsum(counts + 1) - 1  # the position after each row's draft
    drafted = np.delete(np.arange(len(logits)), last)
    index = np.concatenate((drafted, last, np.repeat(np.arange(len(counts)), counts + 1), _offsets(counts + 1)))
    index = torch.from_numpy(index).to(logits.device, non_blocking=True)
    drafted, last, row, offset = index.split([len(draft), len(counts), len(logits), len(logits)])

    if rule == "rejection":
        plain = sampling.sample(logits[last], keys[last], num_generated[last], params)
        is_right, *tested = _reject(logits[drafted], draft, keys[drafted], num_generated[drafted], params, draft_logprobs)
        whole = (torch.cat(columns) for columns in zip(tested, plain, strict=True))
        token, logprob, full_logprob = (torch.empty_like(w).index_copy_(0, index[: len(logits)], w) for w in whole)
    else:
        token, logprob, full_logprob = sampling.sample(logits, used, num_generated, params)
        is_right = token[drafted] == draft
    # A row's accepted tokens are those before its first wrong one; the position after the draft counts as wrong.
    is_right = torch.zeros_like(token, dtype=torch.bool).index_copy_(0, drafted, is_right)
    wrong_at = offset.masked_fill(is_right, len(logits))
    accepted = torch.full_like(last, len(logits)).scatter_reduce_(0, row, wrong_at, "amin")
    return Verified(accepted, token, logprob, full_logprob)


def num_gained(
    token: np.ndarray, accepted: np.ndarray, counts: np.ndarray, stop_token_ids: tuple[int, ...], limit: np.ndarray
) -> np.ndarray:
    """Tokens each row gains by a verification, int64 [R]: the accepted and the next, cut after a stop token and at `limit`.

    All on the host. token: int64 [T]; accepted, counts: int64 [R]; limit: int64 [R], tokens a row may still get, at least 1.
    """
    stop_at = np.where(is_stop(token, stop_token_ids), _offsets(counts + 1), len(token))
    first_stop = np.minimum.reduceat(stop_at, np.cumsum(counts + 1) - (counts + 1))
    return np.minimum(np.minimum(accepted, first_stop) + 1, limit)


def is_stop(token: np.ndarray, stop_token_ids: tuple[int, ...]) -> np.ndarray:
    """bool [T]; what np.isin says, ten times sooner for a few stop tokens."""
    found = np.zeros(len(token), bool)
    for stop in stop_token_ids:
        found |= token == stop
    return found


def _reject(logits, draft, keys, num_generated, params, draft_logprobs):
    """The rejection rule at all S draft positions, in chunks: whether x is accepted bool [S], then as `sample` does."""
    rows = max(1, sampling.MAX_LOGITS_AT_ONCE[logits.device.type] // logits.shape[1])
    chunks = zip(*(t.split(rows) for t in (logits, draft, keys, num_generated, draft_logprobs)), strict=True)
    parts = [_reject_chunk(*chunk, params) for chunk in chunks]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _reject_chunk(logits, draft, keys, num_generated, draft_logprobs, params):
    logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    log_p = sampling.restrict(logits, num_generated, params).log_softmax(-1)
    if params.temperature == 0.0:  # all of p on the best token
        best = log_p.argmax(-1, keepdim=True)
        log_p = torch.full_like(log_p, float("-inf")).scatter_(1, best, 0.0)
    p, q = log_p.exp(), draft_logprobs.to(log_p.dtype).exp()

    u = (random_bits(_further(keys, ACCEPT), 1)[:, 0].double() + 0.5) * 2.0**-31  # double: in float32 it could be 1
    log_ratio = (log_p - draft_logprobs).gather(1, draft[:, None])[:, 0]
    is_right = u < log_ratio.double().exp()

    residual = (p - q).clamp_(min=0.0)
    # p = q but for rounding leaves nothing to sample from; the test then fails with a chance of that rounding alone.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    resampled = gumbel(_further(keys, FRESH), p.shape[1], p.dtype).add_(residual.log_()).argmax(-1)
    token = torch.where(is_right, draft, resampled)
    logprob = log_p.gather(1, token[:, None])[:, 0]
    return is_right, token, logprob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0]


def _further(keys: torch.Tensor, offset: int) -> torch.Tensor:
    """Keys of the same streams read from `offset` on: a stream's token ids are added to its key's first word."""
    keys = keys.clone()
    keys[:, 0] += offset
    return keys


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ..., length - 1 for every row, rows one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
