"""Drafts of coming steps, generated early with their samples' own noise, kept for later use.

Only token ids are kept: 4 bytes per token, no keys and values, no probabilities. All ranks hold the
same drafts, since they put the same exchanged ones into the store in the same order.
"""

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
