"""From logits to tokens: Gumbel-max with keyed noise, so a token is a pure function of its logits
and its noise key.

argmax_v(log p_v + g_v) with standard Gumbel g is an exact sample of p (Gumbel 1954; Maddison et al.
2014, "A* sampling").

Shape legend: N positions to sample, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

from bubblespec.engine.noise import gumbel
from bubblespec.engine.packing import to_device

# Positions are sampled in chunks of about this many logits: small enough for a processor's cache,
# large enough for a GPU.
MAX_LOGITS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}


@dataclass(frozen=True)
class SamplingParams:
    """The sampled distribution, and the tokens that end a response."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Probability of the nucleus; 1 truncates nothing."""
    top_k: int = 0
    """Number of best tokens; 0 truncates nothing."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response."""
    min_length: int = 0
    """Response tokens before which stop tokens are barred."""


def sample(
    logits: torch.Tensor, keys: torch.Tensor, num_generated: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token for each of N positions.

    logits: [N, V]; keys: int32 [N, 4], noise streams; num_generated: int64 [N], response tokens
    before this one. Returns token int64 [N], and float [N] twice: its log-probability under the
    distribution it was drawn from, and under the untruncated one (softmax of logits / temperature;
    of the logits themselves when greedy).
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = max(1, MAX_LOGITS_AT_ONCE[logits.device.type] // logits.shape[1])
    chunks = zip(logits.split(rows), keys.split(rows), num_generated.split(rows), strict=True)
    parts = [_sample_chunk(chunk.to(dtype), k, n, params) for chunk, k, n in chunks]
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _sample_chunk(logits, keys, num_generated, params):
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    full_log_z = logits.logsumexp(-1)
    allowed = restrict(logits, num_generated, params)
    if params.temperature == 0.0:
        token = allowed.argmax(-1)
    else:
        token = gumbel(keys, logits.shape[1], logits.dtype).add_(allowed).argmax(-1)
    chosen = logits.gather(-1, token[:, None])[:, 0]
    full_logprob = chosen - full_log_z
    if params.temperature == 0.0:
        return token, torch.zeros_like(full_logprob), full_logprob
    logprob = full_logprob if allowed is logits else chosen - allowed.logsumexp(-1)
    return token, logprob, full_logprob


def restrict(
    logits: torch.Tensor, num_generated: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """Logits [N, V] (already divided by the temperature) with barred tokens at -inf: stop tokens
    too early, then all but the top_k, then all outside the nucleus (the smallest set of best tokens
    with probability at least top_p)."""
    if params.stop_token_ids and params.min_length > 0:
        too_early = num_generated < params.min_length
        stop = to_device(np.array(params.stop_token_ids), logits.device)
        barred = (
            torch.zeros_like(logits, dtype=torch.bool).index_fill_(1, stop, True)
            & too_early[:, None]
        )
        logits = logits.masked_fill(barred, float("-inf"))
    if 0 < params.top_k < logits.shape[1]:
        threshold = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if params.top_p < 1.0:
        ordered, index = logits.sort(descending=True, stable=True)
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(
            1, index, before >= params.top_p
        )
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits
