"""Seconds of a micro-batch, learnt from those before it: how many tokens may be in one that must
not take long."""

import numpy as np

FORGETTING = 0.9  # what an observation counts for after another one


class MicrobatchCost:
    """seconds = a + b * tokens, both at least 0, by least squares with forgetting."""

    def __init__(self):
        self._products, self._seconds = np.zeros((2, 2)), np.zeros(2)  # sums over [1, tokens]
        self._coefficients: tuple[float, float] | None = None

    def observe(self, num_microbatches: int, num_tokens: int, seconds: float) -> None:
        """So many micro-batches with so many tokens together have taken so long; they count as one
        of their mean size."""
        features = np.array([1.0, num_tokens / num_microbatches])
        self._products = FORGETTING * self._products + np.outer(features, features)
        self._seconds = FORGETTING * self._seconds + features * seconds / num_microbatches
        self._coefficients = self._fit()

    def _fit(self) -> tuple[float, float]:
        """Through the origin where the sizes so far are too alike to tell, or one of the two would
        be negative."""
        (count, tokens), (_, squares) = self._products
        determinant = count * squares - tokens * tokens
        if determinant > 1e-3 * count * squares:
            a = (squares * self._seconds[0] - tokens * self._seconds[1]) / determinant
            b = (count * self._seconds[1] - tokens * self._seconds[0]) / determinant
            if a >= 0 and b > 0:
                return float(a), float(b)
        return 0.0, float(self._seconds[1] / squares)

    @property
    def is_known(self) -> bool:
        """Whether there was an observation: nothing can be asked before."""
        return self._coefficients is not None

    def seconds(self, num_tokens: int) -> float:
        """Of a micro-batch of so many tokens."""
        a, b = self._coefficients
        return a + b * num_tokens

    def tokens_s(self, num_tokens: int) -> float:
        """What so many tokens add to a micro-batch that is computed anyway."""
        return self._coefficients[1] * num_tokens

    def max_tokens(self, limit_s: float) -> int:
        """Most tokens that take at most `limit_s` seconds."""
        a, b = self._coefficients
        return int(max(limit_s - a, 0.0) / max(b, 1e-12))
