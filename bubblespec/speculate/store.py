"""Run-ahead drafts: responses of coming steps, sampled early with the noise that their own step will use.

Only token ids are kept: 4 bytes a token, no keys and values, no probabilities. All ranks hold the same store, since they put
the same exchanged drafts into it in the same order.
"""

from dataclasses import dataclass

import numpy as np

from bubblespec.ranks.collectives import Ranks

Key = tuple[int, int, int]  # (step, prompt uid, sample)
HEADER = 7  # step, uid, sample, number of tokens, finished, version, holder


@dataclass
class Draft:
    """tokens: int32; is_finished: ends as a response does; version: updates of the weights that last extended it; holder: the
    rank whose engine still has it, to go on with it in the next rollout, or -1."""

    tokens: np.ndarray
    is_finished: bool
    version: int
    holder: int = -1


class DraftStore:
    """Drafts by (step, prompt uid, sample), at most `max_tokens` of them; what would exceed that is not taken."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._drafts: dict[Key, Draft] = {}

    def __len__(self) -> int:
        return len(self._drafts)

    def get(self, key: Key) -> Draft | None:
        """The draft kept for a sample, if there is one."""
        return self._drafts.get(key)

    def put(self, key: Key, draft: Draft) -> bool:
        """Keep a draft in place of an earlier one of its key. False, and no change, if there is no room for it."""
        old = self._drafts.get(key)
        growth = len(draft.tokens) - (len(old.tokens) if old else 0)
        if self.num_tokens + growth > self.max_tokens:
            return False
        self._drafts[key] = draft
        self.num_tokens += growth
        return True

    def drop_until(self, step: int) -> None:
        """Forget the drafts of `step` and of all steps before it."""
        for key in [key for key in self._drafts if key[0] <= step]:
            self.num_tokens -= len(self._drafts.pop(key).tokens)

    def state_dict(self) -> dict[str, np.ndarray]:
        """All drafts, as they go from rank to rank: a header and tokens, see `_pack`."""
        return dict(zip(("header", "tokens"), _pack(self._drafts), strict=True))

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state; no engine holds any of its drafts."""
        self._drafts, self.num_tokens = {}, 0
        for key, draft in _unpack(state["header"], state["tokens"]):
            draft.holder = -1
            self.put(key, draft)


def exchange(store: DraftStore, own: dict[Key, Draft], ranks: Ranks) -> int:
    """Put every rank's new drafts into every rank's store; returns the number of tokens that all ranks offered."""
    header, tokens = _pack(own)
    headers, all_tokens = ranks.gather_ragged(header), ranks.gather_ragged(tokens)
    for rank_header, rank_tokens in zip(headers, all_tokens, strict=True):
        for key, draft in _unpack(rank_header, rank_tokens):
            store.put(key, draft)
    return sum(len(t) for t in all_tokens)


def _pack(drafts: dict[Key, Draft]) -> tuple[np.ndarray, np.ndarray]:
    """Headers int64 [drafts * HEADER] and tokens int32, one draft after the other."""
    header = [(*key, len(d.tokens), int(d.is_finished), d.version, d.holder) for key, d in drafts.items()]
    tokens = [d.tokens for d in drafts.values()]
    return np.array(header, np.int64).ravel(), np.concatenate([np.empty(0, np.int32), *tokens])


def _unpack(header: np.ndarray, tokens: np.ndarray) -> list[tuple[Key, Draft]]:
    fields = header.reshape(-1, HEADER)
    parts = np.split(tokens, np.cumsum(fields[:, 3])[:-1]) if len(fields) else []
    return [
        ((int(step), int(uid), int(sample)), Draft(part, bool(finished), int(version), int(holder)))
        for (step, uid, sample, _, finished, version, holder), part in zip(fields, parts, strict=True)
    ]
