"""Exact verification of draft tokens: which of them the current policy would have sampled, and what
it samples after them.

Under both rules every token has exactly the law of plain sampling. p is the current policy after
temperature and truncation, x the draft token, y a token sampled from p. y does not depend on the
draft, so drafts may be selected by their content, which the usual rejection rule does not allow
(notebooks/exactness.ipynb; the rule is in benchmarks/accept_rules.py).

coupled     accept while y = x, with y from the noise that plain sampling would use. The draft
            cannot change y at all. A draft made with the same noise under nearby weights q is
            nearly always accepted: the chance of y = x is at least (1 - TV) / (1 + TV) (Daliri,
            Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative
            decoding"), and TV is the total variation distance of p and q.
point_mass  the same with noise that no draft has seen, so y is independent of x: accepted with
chance p(x).

Shape legend: R rows, n draft tokens of a row, S draft tokens of all rows, T = S + R positions, V
vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from bubblespec.engine import sampling
from bubblespec.engine.packing import to_host
from bubblespec.engine.scheduler import num_accepted

RULES = ("coupled", "point_mass")

# Plain sampling and drafts read a stream at the token ids, from 0. At FRESH + token id, beyond any
# vocabulary, each stream has noise that no draft has used.
FRESH = 1 << 29


class Verified(NamedTuple):
    """Result of a verification, on the host. With `first` a row's first position, token[first :
    first + accepted] are its accepted draft tokens, and token[first + accepted] comes next. Entries
    after a rejected token are invalid."""

    accepted: np.ndarray
    """int64 [R], leading draft tokens accepted."""
    token: np.ndarray
    """int64 [T], see `sample`."""
    logprob: np.ndarray
    """[T], see `sample`."""
    full_logprob: np.ndarray
    """[T], see `sample`."""


def verify(
    logits: torch.Tensor,
    draft: np.ndarray,
    counts: np.ndarray,
    keys: torch.Tensor,
    *,
    num_generated: torch.Tensor,
    params: sampling.SamplingParams,
    rule: str = "coupled",
    sample: Callable = sampling.sample,
) -> Verified:
    """Verify the drafts of R rows; a row without a draft is sampled plainly, from the fresh noise
    under point_mass.

    logits: [T, V], rows one after the other, each with n + 1 positions, which predict its draft
    tokens and the one after them; draft: int64 [S] and counts: int64 [R], n of each row, both on
    the host; keys: int32 [T, 4] and num_generated: int64 [T], of every position, as in `sample`.
    The host waits for the device once. sample: what samples from these logits, where they are a
    slice of the vocabulary something else than `sampling.sample`.

    Length limits and stop tokens are the caller's affair: see `num_gained` in scheduler.py. Under
    point_mass, a row's every token must come from here, or else a choice of drafts by content
    chooses the plain noise of the rows left without one. Raises ValueError for another rule, and
    for lengths that do not fit.
    """
    if rule not in RULES:
        raise ValueError(f"accept rule {rule!r} is none of {', '.join(RULES)}")
    if len(logits) != len(counts) + len(draft) or len(draft) != counts.sum():
        raise ValueError(
            f"{len(logits)} positions and {len(draft)} draft tokens do not fit {len(counts)} rows of sum {counts.sum()}"
        )
    keys = further(keys, FRESH) if rule == "point_mass" else keys
    token, logprob, full_logprob = to_host(*sample(logits, keys, num_generated, params))
    token = token.astype(np.int64, copy=False)
    return Verified(num_accepted(token, draft, counts), token, logprob, full_logprob)


def further(keys: torch.Tensor, offset: int) -> torch.Tensor:
    """Keys of the same streams read from `offset` on: a stream's token ids are added to its key's
    first word."""
    keys = keys.clone()
    keys[:, 0] += offset
    return keys
