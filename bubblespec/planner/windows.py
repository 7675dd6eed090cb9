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
    drafted = available.nonzero()[0]
    if not len(drafted):
        return windows, False
    # Most rows have one of few survivals and as many tokens as they may have. Rows that are alike
    # are planned together: a kind is survival and available tokens, as the parts of one number.
    survival = np.minimum(np.maximum(survival[drafted], 1e-3), 1 - 1e-6)
    both, kind, size = np.unique(
        available[drafted] + survival, return_inverse=True, return_counts=True
    )
    most, s = both.astype(np.int64)[:, None], (both % 1.0).round(9)[:, None]
    reach = np.minimum(WINDOWS, most)
    tokens = reach[:, 1:] - reach[:, :-1]  # [kinds, segments]
    expected = s * (1 - s**reach) / (1 - s)  # sum of s**i up to each window
    gain = expected[:, 1:] - expected[:, :-1]
    # A row's segments stay in order.
    density = np.where(tokens > 0, gain / np.maximum(tokens, 1), -1.0)
    density = np.minimum.accumulate(density, axis=1).ravel()
    order = (-density).argsort(kind="stable")
    order = order[density[order] > 0]
    order = order.repeat(size[order // tokens.shape[1]])  # segments of rows
    fed = tokens.ravel()[order].cumsum()
    order = order[: fed.searchsorted(budget, side="right")]
    fed = np.append(0, fed[: len(order)])
    gained = rows + np.append(0.0, gain.ravel()[order].cumsum())
    seconds = cost.seconds(rows, rows + fed, fed > 0, kv_tokens)
    best = int((gained / seconds).argmax())
    if gained[best] / (seconds[best] + overhead_s) < MIN_GAIN * rows / seconds[0]:
        return windows, False
    # All rows of a kind get a segment, but for the last one, which the first of them get.
    num_rows = np.bincount(order[:best], minlength=tokens.size).reshape(tokens.shape)
    windows[drafted] = (tokens * (num_rows > 0)).sum(axis=1)[kind]
    last = divmod(int(order[best - 1]), tokens.shape[1])
    without = (kind == last[0]).nonzero()[0][num_rows[last] :]
    windows[drafted[without]] -= tokens[last]
    return windows, True


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
