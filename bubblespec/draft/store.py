"""The store of drafts: samples of coming steps, generated early with the noise that their own step
will use.

Only token ids are kept: 4 bytes a token, no keys and values, no probabilities. All ranks hold the
same store, since they put the same exchanged drafts into it in the same order.
"""

from collections.abc import Iterable

import numpy as np

from bubblespec.dist.ranks import Ranks
from bubblespec.types import Draft, SampleId

HEADER = 7  # uid, visit, sample, number of tokens, finished, version, holder


class DraftStore:
    """Drafts by sample, of at most `max_tokens` together; what would exceed that is not taken."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._drafts: dict[SampleId, Draft] = {}

    def __len__(self) -> int:
        return len(self._drafts)

    def get(self, sample: SampleId) -> Draft | None:
        """The draft of a sample, if there is one."""
        return self._drafts.get(sample)

    def put(self, sample: SampleId, draft: Draft) -> bool:
        """Take a draft in place of an earlier one of its sample. False, and no change, if there is
        no room for it."""
        old = self._drafts.get(sample)
        growth = len(draft.tokens) - (len(old.tokens) if old else 0)
        if self.num_tokens + growth > self.max_tokens:
            return False
        self._drafts[sample] = draft
        self.num_tokens += growth
        return True

    def drop(self, ids: Iterable[SampleId]) -> None:
        """Forget the drafts of these samples, where there are any."""
        for sample in ids:
            if sample in self._drafts:
                self.num_tokens -= len(self._drafts.pop(sample).tokens)

    def state_dict(self) -> dict[str, np.ndarray]:
        """All drafts, as they go from rank to rank: a header and tokens, see `_pack`."""
        return dict(zip(("header", "tokens"), _pack(self._drafts), strict=True))

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state; no engine holds any of its drafts."""
        self._drafts, self.num_tokens = {}, 0
        for sample, draft in _unpack(state["header"], state["tokens"]):
            draft.holder = -1
            self.put(sample, draft)


def exchange(store: DraftStore, own: dict[SampleId, Draft], ranks: Ranks) -> int:
    """Put every rank's new drafts into every rank's store; returns the number of tokens that all
    ranks offered."""
    header, tokens = _pack(own)
    headers, all_tokens = ranks.gather_ragged(header), ranks.gather_ragged(tokens)
    for rank_header, rank_tokens in zip(headers, all_tokens, strict=True):
        for sample, draft in _unpack(rank_header, rank_tokens):
            store.put(sample, draft)
    return sum(len(t) for t in all_tokens)


def _pack(drafts: dict[SampleId, Draft]) -> tuple[np.ndarray, np.ndarray]:
    """Headers int64 [drafts * HEADER] and tokens int32, one draft after the other."""
    header = [
        (*sample, len(d.tokens), int(d.is_finished), d.version, d.holder)
        for sample, d in drafts.items()
    ]
    tokens = [d.tokens for d in drafts.values()]
    return np.array(header, np.int64).ravel(), np.concatenate([np.empty(0, np.int32), *tokens])


def _unpack(header: np.ndarray, tokens: np.ndarray) -> list[tuple[SampleId, Draft]]:
    fields = header.reshape(-1, HEADER)
    parts = np.split(tokens, np.cumsum(fields[:, 3])[:-1]) if len(fields) else []
    return [
        (
            SampleId(int(uid), int(visit), int(number)),
            Draft(part, bool(finished), int(version), int(holder)),
        )
        for (uid, visit, number, _, finished, version, holder), part in zip(
            fields, parts, strict=True
        )
    ]
