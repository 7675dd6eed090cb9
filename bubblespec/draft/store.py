"""Texts kept for later use: drafts of coming steps, and responses of earlier epochs.

Drafts are generated early with their samples' own noise; responses serve suffix matches (RhymeRL,
arXiv 2508.18588).

Only token ids are kept: 4 bytes per token, no keys and values, no probabilities. All ranks hold the
same texts, since they put the same exchanged drafts into the store in the same order.
"""

from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import zip_longest

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.types import Draft, SampleId

HEADER = 6  # uid, visit, sample, number of tokens, is_finished + 2 * is_deferred, version


class DraftStore:
    """Drafts by sample, at most `max_tokens` in all.

    A draft of a coming step is refused where there is no room. The draft of a deferred sample holds
    its tokens so far and is never lost: it displaces drafts of coming steps, the latest first, as
    the most urgent ones are drafted first."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._drafts: dict[SampleId, Draft] = {}
        self._deferred: set[SampleId] = set()

    def __len__(self) -> int:
        return len(self._drafts)

    def get(self, sample: SampleId) -> Draft | None:
        """Return the draft of a sample, if there is one."""
        return self._drafts.get(sample)

    def put(self, sample: SampleId, draft: Draft, *, is_deferred: bool = False) -> bool:
        """Store a draft in place of the sample's earlier one; return whether there was room.

        is_deferred: whether the sample is deferred from now on."""
        is_deferred |= sample in self._deferred
        old = self._drafts.get(sample)
        growth = len(draft.tokens) - (len(old.tokens) if old else 0)
        if not is_deferred and self.num_tokens + growth > self.max_tokens:
            return False
        self._drafts[sample] = draft
        self.num_tokens += growth
        if is_deferred:
            self._deferred.add(sample)
        if self.num_tokens > self.max_tokens:
            for name in [name for name in reversed(self._drafts) if name not in self._deferred]:
                self.drop([name])
                if self.num_tokens <= self.max_tokens:
                    break
        return True

    def drop(self, ids: Iterable[SampleId]) -> None:
        """Drop the drafts of these samples, if any."""
        for sample in ids:
            if sample in self._drafts:
                self.num_tokens -= len(self._drafts.pop(sample).tokens)
                self._deferred.discard(sample)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all drafts in the format of an exchange, see `_pack`."""
        header, tokens = _pack(self._drafts, self._deferred)
        return {"header": header, "tokens": tokens}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state."""
        self._drafts, self._deferred, self.num_tokens = {}, set(), 0
        for sample, draft, is_deferred in _unpack(state["header"], state["tokens"]):
            self.put(sample, draft, is_deferred=is_deferred)


def exchange(
    store: DraftStore, own: dict[SampleId, Draft], ranks: Ranks, *, are_deferred: bool = False
) -> None:
    """Put every rank's new drafts into every rank's store, round-robin.

    own: this rank's drafts, the most urgent first."""
    header, tokens = _pack(own, own if are_deferred else ())
    # One collective: with small models its latency counts most.
    gathered = ranks.gather_ragged(np.concatenate(([len(header)], header, tokens)))
    parts = (np.split(of_rank, (1, 1 + of_rank[0])) for of_rank in gathered)
    drafts = (_unpack(headers, packed.astype(np.int32)) for _, headers, packed in parts)
    for turn in zip_longest(*drafts):
        for sample, draft, is_deferred in filter(None, turn):
            store.put(sample, draft, is_deferred=is_deferred)


def _pack(
    drafts: dict[SampleId, Draft], deferred: Container[SampleId]
) -> tuple[np.ndarray, np.ndarray]:
    """Return headers, int64 [drafts * HEADER], and tokens, int32, one draft after the other."""
    header = [
        (*sample, len(draft.tokens), draft.is_finished + 2 * (sample in deferred), draft.version)
        for sample, draft in drafts.items()
    ]
    tokens = [draft.tokens for draft in drafts.values()]
    return np.array(header, np.int64).ravel(), np.concatenate([np.empty(0, np.int32), *tokens])


def _unpack(header: np.ndarray, tokens: np.ndarray) -> Iterator[tuple[SampleId, Draft, bool]]:
    """Yield (sample, draft, whether the sample is deferred)."""
    fields = header.reshape(-1, HEADER)
    parts = np.split(tokens, np.cumsum(fields[:, 3])[:-1])
    for (*sample, _, flags, version), part in zip(fields.tolist(), parts, strict=False):
        yield SampleId(*sample), Draft(part, bool(flags & 1), version), flags >= 2


class History:
    """Responses of earlier epochs by prompt uid, at most max_tokens in all; the oldest go first."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.entries: dict[int, deque[tuple[np.ndarray, float]]] = {}  # by uid, oldest first
        self.order: deque[int] = deque()  # uid of every entry, oldest first

    def add(self, uid: int, tokens: np.ndarray, reward: float) -> None:
        """Store a copy of a response, int [L], unless it is empty or alone exceeds the bound."""
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
        """Return (int32 tokens [L], reward) of a prompt's responses, oldest first."""
        return list(self.entries.get(uid, ()))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return N responses, oldest first: uid, length and reward [N], and tokens int32 [T]."""
        parts = {uid: iter(entries) for uid, entries in self.entries.items()}
        entries = [next(parts[uid]) for uid in self.order]
        return {
            "uid": np.array(self.order, np.int64),
            "length": np.array([len(tokens) for tokens, _ in entries], np.int64),
            "reward": np.array([reward for _, reward in entries], np.float64),
            "tokens": np.concatenate([np.empty(0, np.int32), *(tokens for tokens, _ in entries)]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a saved state. Under a smaller bound its oldest responses are dropped."""
        self.entries.clear()
        self.order.clear()
        self.num_tokens = 0
        texts = np.split(state["tokens"], np.cumsum(state["length"])[:-1])
        for uid, tokens, reward in zip(state["uid"].tolist(), texts, state["reward"], strict=False):
            self.add(uid, tokens, reward)
