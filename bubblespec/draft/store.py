"""Texts that later responses are drafted from, by sample, the same on all ranks.

Drafts of coming steps are generated early, with their samples' own noise; responses of earlier
epochs serve suffix matches (RhymeRL, arXiv 2508.18588). Only token ids are kept: 4 bytes per token,
no keys and values, no probabilities. Drafts are exchanged, and put into all ranks' stores in the
same order.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import zip_longest

import numpy as np

from bubblespec.distributed.ranks import Ranks
from bubblespec.types import Draft, SampleId

# prompt_id, draw_index, sample, number of tokens, is_finished + 2 * is_deferred, version
HEADER = 6


class TextStore:
    """Texts by sample, at most `max_tokens` in all.

    A text is refused where there is no room, or with `keeps_latest` displaces the oldest ones. The
    draft of a deferred sample holds its tokens so far and is never lost: it displaces drafts of
    coming steps, the latest first, as the most urgent ones are drafted first."""

    def __init__(self, max_tokens: int, keeps_latest: bool = False):
        self.max_tokens, self.keeps_latest = max_tokens, keeps_latest
        self._clear()

    def _clear(self) -> None:
        self.num_tokens = 0
        self._texts: OrderedDict[SampleId, Draft] = OrderedDict()
        self._of_prompt: defaultdict[int, dict[SampleId, Draft]] = defaultdict(dict)
        self._deferred: set[SampleId] = set()

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, sample: SampleId) -> Draft | None:
        """Return the text of a sample, if there is one."""
        return self._texts.get(sample)

    def of_prompt(self, prompt_id: int) -> list[Draft]:
        """Return the texts of a prompt's samples, oldest first."""
        return list(self._of_prompt[prompt_id].values()) if prompt_id in self._of_prompt else []

    def put(self, sample: SampleId, draft: Draft, *, is_deferred: bool = False) -> bool:
        """Store a text in place of the sample's earlier one; return whether there was room.

        is_deferred: whether the sample is deferred from now on."""
        is_deferred |= sample in self._deferred
        old = self._texts.get(sample)
        growth = len(draft.tokens) - (len(old.tokens) if old else 0)
        kept = 0 if self.keeps_latest else self.num_tokens
        if not is_deferred and kept + growth > self.max_tokens:
            return False
        self._texts[sample] = self._of_prompt[sample.prompt_id][sample] = draft
        self.num_tokens += growth
        if is_deferred:
            self._deferred.add(sample)
        while self.num_tokens > self.max_tokens:
            order = self._texts if self.keeps_latest else reversed(self._texts)
            name = next((name for name in order if name not in self._deferred), None)
            if name is None:
                break
            self.drop([name])
        return True

    def drop(self, ids: Iterable[SampleId]) -> None:
        """Drop the texts of these samples, if any."""
        for sample in ids:
            if sample in self._texts:
                self.num_tokens -= len(self._texts.pop(sample).tokens)
                self._deferred.discard(sample)
                del self._of_prompt[sample.prompt_id][sample]
                if not self._of_prompt[sample.prompt_id]:
                    del self._of_prompt[sample.prompt_id]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all texts in the format of an exchange, see `_pack`, and their rewards."""
        header, tokens = _pack(self._texts, self._deferred)
        rewards = np.array([draft.reward for draft in self._texts.values()], np.float64)
        return {"header": header, "tokens": tokens, "reward": rewards}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore a saved state."""
        self._clear()
        header, rewards = state.get("header"), state.get("reward")
        if header is None:  # responses that were saved without their ids
            number = np.arange(len(state["uid"]))
            columns = (state["uid"], 0 * number - 1, number, state["length"], 0 * number + 1)
            header = np.stack((*columns, 0 * number), axis=1)
        for number, (sample, draft, is_deferred) in enumerate(_unpack(header, state["tokens"])):
            draft.reward = 0.0 if rewards is None else float(rewards[number])
            self.put(sample, draft, is_deferred=is_deferred)


def exchange(
    store: TextStore, own: dict[SampleId, Draft], ranks: Ranks, *, are_deferred: bool = False
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
    drafts: Mapping[SampleId, Draft], deferred: Container[SampleId]
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
