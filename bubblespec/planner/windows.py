"""How many draft tokens each row feeds in a forward, and how many the drafter drafts before it.

A forward takes T seconds, and a draft token is accepted only if all tokens before it were. With
survival s, the probability that one more token of a draft is right, the i-th token of a window adds
s**i accepted tokens and the cost of feeding one more token (Leviathan et al. 2023, arXiv
2211.17192, equation 1). Windows are filled greedily, best segment first, up to the point where
accepted tokens per second, (rows + sum of s**i) / T, are highest. If no draft token pays, all
windows are empty and the forward decodes one token per row.

A cost model is anything with `seconds(rows, tokens, wide_rows, kv_tokens)`, vectorised, and
`coefficients`; see `CostModel`.
"""

import numpy as np

from bubblespec.records import ACCEPT_BINS

WINDOWS = np.array(ACCEPT_BINS)
MIN_GAIN = 1.05  # in tokens per second, by estimates that are noisy and of which the best is taken


def choose_windows(
    survival: np.ndarray,
    available: np.ndarray,
    cost,
    kv_tokens: int,
    *,
    budget: int,
    overhead_s: float = 0.0,
) -> tuple[np.ndarray, bool]:
    """Draft tokens of each of R decoding rows, int64 [R], and whether looking for them pays.

    survival: float64 [R]; available: int64 [R], tokens proposed for each row; kv_tokens: attended
    to by all rows together; budget: maximum of draft tokens of all rows; overhead_s: seconds that
    finding the proposals took.
    """
    rows, windows = len(survival), np.zeros(len(survival), np.int64)
    drafted = np.flatnonzero(available)
    if len(drafted) == 0:
        return windows, False
    s = np.minimum(np.maximum(survival[drafted], 1e-3), 1 - 1e-6)[:, None]
    reach = np.minimum(WINDOWS, available[drafted, None])
    tokens = reach[:, 1:] - reach[:, :-1]  # [rows with drafts, segments]
    expected = s * (1 - s**reach) / (1 - s)  # sum of s**i up to each window
    gain = expected[:, 1:] - expected[:, :-1]
    # A row's segments stay in order.
    density = np.minimum.accumulate(
        np.where(tokens > 0, gain / np.maximum(tokens, 1), -1.0), axis=1
    ).ravel()
    order = _descending(density)
    fed = np.cumsum(tokens.ravel()[order])
    order = order[: int(np.searchsorted(fed, budget, side="right"))]
    fed = np.concatenate(([0], fed[: len(order)]))
    gained = np.concatenate(([0.0], np.cumsum(gain.ravel()[order])))
    seconds = cost.seconds(rows, rows + fed, fed > 0, kv_tokens)
    best = int(((rows + gained) / seconds).argmax())
    rate, plain_rate = (rows + gained[best]) / (seconds[best] + overhead_s), rows / seconds[0]
    if rate < MIN_GAIN * plain_rate:
        return windows, False
    chosen = order[:best]
    windows[drafted] = np.bincount(
        chosen // tokens.shape[1], weights=tokens.ravel()[chosen], minlength=len(drafted)
    )
    return windows, True


def _descending(values: np.ndarray) -> np.ndarray:
    """Indices of the positive ones of float64 [N], the largest first, equal ones in their order. A
    stable argsort takes ten times as long as this sort of integers: positive floats are ordered as
    their bits are, of which the last ones give way to the index."""
    bits, size = values.view(np.int64), 1 << len(values).bit_length()
    positive = (values > 0).nonzero()[0]
    return np.sort(positive - bits[positive] // size * size) & (size - 1)


def choose_chain_length(
    acceptance_rates: np.ndarray, cost, drafter_cost, active: int, count: int, kv_tokens: int
) -> int:
    """Tokens that the drafter drafts for each of `count` of `active` rows: the number, 0 included,
    that gives most tokens per second.

    acceptance_rates: float64 [n], probability that the first 1, 2, ..., n tokens of a chain are all
    accepted; drafter_cost: of chains, where rows are forwards of the drafter and tokens those it is
    fed; kv_tokens: attended to by all active rows.
    """
    lengths = np.arange(len(acceptance_rates) + 1)
    gained = active + count * np.concatenate(([0.0], np.cumsum(acceptance_rates)))
    seconds = cost.seconds(active, active + count * lengths, count * (lengths > 0), kv_tokens)
    drafter_s = drafter_cost.seconds(lengths, count * np.maximum(lengths, 1))
    return int((gained / (seconds + np.where(lengths > 0, drafter_s, 0.0))).argmax())
