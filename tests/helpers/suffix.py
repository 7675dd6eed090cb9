"""The suffix index of one group, asked row by row."""

import numpy as np

from bubblespec.draft.suffix import (
    HISTORY,
    HISTORY_OWNER,
    LIVE,
    MAX_MATCH,
    NOTHING,
    PROMPT_OWNER,
    SELF,
    SuffixIndex,
)

CAPACITY = 1000  # tokens of a row


def texts_of(index: SuffixIndex, rows) -> list[list[int]]:
    """Tokens of rows so far."""
    live = index.rows[rows, LIVE]
    ends = zip((index.begin[live] + MAX_MATCH).tolist(), index.end[live].tolist(), strict=True)
    return [index.text[begin:end].tolist() for begin, end in ends]


class GroupIndex:
    """history: (tokens, reward) of earlier responses, the latest first."""

    def __init__(self, history=(), *, prompt=()):
        self.index, self.rows = SuffixIndex(), {}
        oldest_first = list(history)[::-1]
        earlier = [tokens for tokens, _ in sorted(oldest_first, key=lambda pair: pair[1])]
        if earlier:
            of = [[value] * len(earlier) for value in (HISTORY_OWNER, HISTORY)]
            self.index.add_texts(earlier, 0, *of)
        if len(prompt):
            self.index.add_texts([np.array(prompt)], 0, [PROMPT_OWNER], [SELF])

    def row(self, sample: int, draft: np.ndarray = NOTHING) -> int:
        if sample not in self.rows:
            self.rows[sample] = len(self.rows)
            self.index.add_row(self.rows[sample], 0, sample, CAPACITY, draft)
            self.index.start_indexing(self.rows[sample])
        return self.rows[sample]

    def extend(self, sample: int, tokens: np.ndarray) -> None:
        self.index.extend(np.array([self.row(sample)]), tokens, np.array([len(tokens)]))
        self.index.index_live()

    def propose(self, sample: int, limit: int) -> tuple[np.ndarray, int, int]:
        found = self.index.propose(np.array([self.row(sample)]), np.array([limit]))
        begin, count, match, source = (int(of[0]) for of in found)
        return self.index.text[begin : begin + count].copy(), match, source
