"""Responses of earlier epochs, by prompt (RhymeRL, arXiv 2508.18588): suffix matching searches
them as well as the texts of the rollout."""

from collections import deque

import numpy as np


class History:
    """Responses of earlier epochs by prompt uid, at most max_tokens in all; the oldest are dropped
    first."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.entries: dict[int, deque[tuple[np.ndarray, float]]] = {}  # by uid, oldest first
        self.order: deque[int] = deque()  # uid of every entry, oldest first

    def add(self, uid: int, tokens: np.ndarray, reward: float) -> None:
        """Store a copy of a response, int [L]. An empty one, or one that exceeds the bound by
        itself, is not stored."""
        if not 0 < len(tokens) <= self.max_tokens:
            return
        self.entries.setdefault(uid, deque()).append((np.array(tokens, np.int32), float(reward)))
        self.order.append(uid)
        self.num_tokens += len(tokens)
        while self.num_tokens > self.max_tokens:
            oldest = self.order.popleft()
            self.num_tokens -= len(self.entries[oldest].popleft()[0])
            if not self.entries[oldest]:
                del self.entries[oldest]

    def get(self, uid: int) -> list[tuple[np.ndarray, float]]:
        """(int32 tokens [L], reward) of a prompt, oldest first."""
        return list(self.entries.get(uid, ()))

    def state_dict(self) -> dict[str, np.ndarray]:
        """N responses of T tokens in all, oldest first: uid, length int64 [N], reward float64 [N],
        tokens int32 [T]."""
        parts = {uid: iter(entries) for uid, entries in self.entries.items()}
        entries = [next(parts[uid]) for uid in self.order]
        return {
            "uid": np.array(self.order, np.int64),
            "length": np.array([len(tokens) for tokens, _ in entries], np.int64),
            "reward": np.array([reward for _, reward in entries], np.float64),
            "tokens": np.concatenate([np.empty(0, np.int32), *(tokens for tokens, _ in entries)]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state. Under a smaller bound its oldest responses are dropped."""
        self.entries.clear()
        self.order.clear()
        self.num_tokens = 0
        texts = np.split(state["tokens"], np.cumsum(state["length"])[:-1])
        for uid, tokens, reward in zip(state["uid"].tolist(), texts, state["reward"], strict=False):
            self.add(uid, tokens, reward)
