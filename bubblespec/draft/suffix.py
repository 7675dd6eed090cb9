"""Draft tokens by suffix matching: where the last tokens of a row's response occurred before,
propose what followed there.

After prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and SuffixDecoding
(Oliaro et al. 2024, arXiv 2411.04975), over the texts of a group of samples. docs/LOG.md compares
the three.

Sources, most trusted first: the row's own draft (made with the same noise under older weights), the
other samples of its group (their drafts, and their tokens so far), its own earlier tokens, the
prompt, and responses of earlier epochs. The longest match wins and trust breaks ties; a match in
the own draft near its expected place counts for more, see `OWN_BONUS`.

All texts of a rollout lie in one array, each behind padding that stands for the prompt. All texts
of a group follow the same prompt, so two responses that agree from their first token on match in
full length, at their beginning as well. Every operation is one over all rows that need it.

Cost: a proposal looks up a fixed number of n-grams, however long the texts are, and none where the
last proposal was accepted and its match has full length.

An "end" is the position in the array where a match ends and its continuation begins.

Shape legend: R rows, P ends.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bubblespec.engine.ragged import doubled, ragged, spans
from bubblespec.records import SOURCES

# Source of a proposal: own draft, other sample, prompt or own tokens, earlier epoch.
OWN, SIBLING, SELF, HISTORY = range(4)
SOURCE_NAMES = SOURCES[1:]

PAD = -1  # never a token
PROMPT_PAD = -2  # in front of the prompt, whose beginning is not the place where responses begin
PROMPT_OWNER, HISTORY_OWNER = -1, -2  # never a sample
MIN_MATCH = 2  # tokens; shortest match outside the own draft
MAX_MATCH = 8  # longer matches count as equal
# Sizes of the indexed n-grams, largest first: of all ends that share the row's last n tokens, for
# the largest such n, the most recent is taken. These yield as much as all sizes from 8 down to 2.
ORDERS = (6, MIN_MATCH)
# A match near its expected place in the own draft is more likely right than its length says: it
# counts this many tokens longer, and one less for every consecutive proposal of which nothing was
# accepted, so that a diverged draft loses its bonus. Measured on outdated drafts of two policies:
# tokens per forward stay within 4% of the best fixed bonus, which is 6 on running sums and 0 on
# free text, where the wrong one costs 4 to 21%.
OWN_BONUS = 6
# (n, distance): how far from its expected place the last n tokens are searched in the own draft,
# largest n first; 0 tokens stand for the expected place itself. One token is enough to detect that
# one was inserted or deleted. A wider search finds repetitions of the same words and measured
# worse; matches further away are found like those in siblings, without the bonus.
OWN_RADIUS = ((2, 4), (1, 1), (0, 0))
# Live tokens are indexed this far behind their end: the most recent end of an n-gram hides older
# ones, which is a loss as long as hardly any tokens follow it.
LIVE_LAG = 8
# Live tokens that are indexed together, of each row where drafts are trusted: while a GPU computes,
# and at the latest.
MIN_INDEXED, MAX_WAITING = 16, 24
# The candidates of that search, best first: distance (0, 1, -1, 2, ...) and tokens.
CANDIDATES = [
    (distance, n)
    for n, radius in OWN_RADIUS
    for distance in sorted(range(radius, -radius - 1, -1), key=abs)
]
DISTANCE, NEEDED = np.array(CANDIDATES).T
# Of the eight last tokens, which of them differ, as the bits of a byte: how many agree at the end.
COMMON = np.array([MAX_MATCH, *((bits & -bits).bit_length() - 1 for bits in range(1, 256))])
NO_MATCH = -(1 << 20)  # less than any match, whatever it counts longer
LAST = -np.arange(1, max(ORDERS) + 1)  # the tokens of an n-gram, from its last on
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, as in Knuth's hashing
WEIGHTS = np.cumprod(np.full(len(LAST) + 1, MIX))  # of the group, and of an n-gram's tokens
NOTHING = np.empty(0, np.int32)
NOT_YET = np.iinfo(np.int64).max // 2  # an end that no text has
LIVE, DRAFT, CURSOR, OFFSET, SOURCE, ASKED_AT, BONUS, SHIFT = range(8)  # columns, see SuffixIndex


class Proposed(NamedTuple):
    """What may follow R rows."""

    begin: np.ndarray
    """int64 [R], where the tokens lie in `SuffixIndex.text`."""
    count: np.ndarray
    """int64 [R], how many."""
    match: np.ndarray
    """int64 [R], last tokens, up to MAX_MATCH, in which row and source agree. Below MIN_MATCH for
    OWN alone; 0 means that the draft continues at its expected place, as it does after one replaced
    token."""
    source: np.ndarray
    """int64 [R], OWN to HISTORY."""


class NgramTable:
    """The two most recent ends of each n-gram of a group, of different owners: at most one is in
    the asking row's own text. A hash table with linear probing."""

    def __init__(self):
        self._clear(1 << 12)

    def _clear(self, capacity: int) -> None:
        self.keys = np.zeros(capacity, np.uint64)  # of n-grams, 0 where there is none
        self.latest, self.second = np.zeros((2, capacity), np.int64)  # ends, 0 for none
        self.num_added = 0

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most recent ends of n-grams, int64 [keys] each; 0 for none."""
        slots = self._slots(keys, adds=False)
        return self.latest[slots], self.second[slots]

    def add(self, keys: np.ndarray, ends: np.ndarray, owner_of: Callable) -> None:
        """Ends of n-grams, the most recent last. owner_of: gives the owners of ends."""
        if 2 * (self.num_added + len(keys)) > len(self.keys):
            self._grow(len(keys))
        self.num_added += len(keys)
        slots = self._slots(keys, adds=True)
        before = self.latest[slots]
        self.latest[slots] = ends  # of equal slots the last end stays
        owner = owner_of(self.latest[slots])
        is_others = (before > 0) & (owner_of(before) != owner)
        self.second[slots[is_others]] = before[is_others]
        is_others = owner_of(ends) != owner
        self.second[slots[is_others]] = ends[is_others]

    def _grow(self, num_more: int) -> None:
        used = self.keys.nonzero()[0]
        keys, latest, second = self.keys[used], self.latest[used], self.second[used]
        self._clear(1 << int(4 * (len(used) + num_more)).bit_length())
        slots = self._slots(keys, adds=True)
        self.latest[slots], self.second[slots] = latest, second
        self.num_added = len(used)

    def _slots(self, keys: np.ndarray, adds: bool) -> np.ndarray:
        """Where the keys are, int64 [keys]; for one that is not there, a free slot."""
        mask = len(self.keys) - 1
        slots = (keys >> np.uint64(20)).astype(np.int64) & mask
        left = np.arange(len(keys))  # indices of keys that are not settled
        while len(left):
            here, wanted = slots[left], keys[left]
            if adds:
                is_free = self.keys[here] == 0
                self.keys[here[is_free]] = wanted[is_free]
            found = self.keys[here]
            left = left[(found != wanted) & (found != 0)]
            slots[left] = (slots[left] + 1) & mask
        return slots


class SuffixIndex:
    """All that can propose tokens for the rows of a rollout. Texts, rows and groups have numbers;
    rows match within their group alone."""

    def __init__(self):
        self.text, self.text_at = np.zeros((2, 1 << 12), np.int32)  # tokens; number of their text
        self._before = sliding_window_view(self.text, MAX_MATCH)
        self.num_positions = 0
        self.num_texts = self.num_rows = 0
        # By text: where it begins, with its padding, and ends; sample or owner; source; group.
        self.begin, self.end, self.owner, self.kind, self.group = np.zeros((5, 16), np.int64)
        # By row, in columns: its text; its draft; of its last proposal the text, its end there
        # minus that of the row's text, which move on together, the source, and the end of the
        # row's text then; what a match in the draft counts longer than it is; and the expected end
        # there minus that of the row's text. Text 0 is empty, and stands for none.
        self.rows = np.zeros((16, 8), np.int64)
        self.indexed = np.zeros(16, np.int64)  # the next end to index
        self.table = NgramTable()
        self._num_waiting = 0.0  # live tokens since they were last indexed
        self._add_text(NOTHING, -1, HISTORY_OWNER, HISTORY, 0)
        self.end[0] = 0  # no end is before it

    def add_texts(
        self, texts: Sequence[np.ndarray], group: int, owners: Sequence[int], kinds: Sequence[int]
    ) -> list[int]:
        """Texts that do not grow, int [L] each, the most trusted last; returns their numbers."""
        numbers = [
            self._add_text(tokens, group, owner, kind, len(tokens))
            for tokens, owner, kind in zip(texts, owners, kinds, strict=True)
        ]
        begin = self.begin[numbers] + MAX_MATCH
        self._index(spans(begin, self.end[numbers] - begin))
        return numbers

    def add_row(self, group: int, sample: int, max_tokens: int) -> int:
        """A row of up to `max_tokens` tokens; returns its number. Its tokens are not indexed before
        `start_indexing`."""
        row = self.num_rows
        self.num_rows += 1
        if row == len(self.rows):
            self.rows, self.indexed = doubled(self.rows), doubled(self.indexed)
        live = self._add_text(NOTHING, group, sample, SELF, max_tokens)
        self.rows[row, LIVE], self.rows[row, ASKED_AT] = live, self.end[live]
        self.indexed[row] = NOT_YET
        return row

    def start_indexing(self, row: int) -> None:
        """Others match in a row's tokens from now on, too."""
        if self.indexed[row] == NOT_YET:
            self.indexed[row] = self.begin[self.rows[row, LIVE]] + MAX_MATCH
            self._num_waiting += self.num_tokens(row)

    def num_tokens(self, row: int) -> int:
        """Tokens that a row has so far."""
        live = self.rows[row, LIVE]
        return int(self.end[live] - self.begin[live]) - MAX_MATCH

    def unindexed_groups(self, rows: np.ndarray) -> set[int]:
        """The groups of those of the rows, int64 [R], whose tokens are not indexed yet."""
        lacking = rows[self.indexed[rows] == NOT_YET]
        return set(self.group[self.rows[lacking, LIVE]].tolist())

    def add_draft(self, row: int, tokens: np.ndarray) -> None:
        """Give a row a draft, int [L], aligned with its response, in place of any it had. Its
        siblings match into it too."""
        live = self.rows[row, LIVE]
        group, sample = int(self.group[live]), int(self.owner[live])
        (draft,) = self.add_texts([tokens], group, [sample], [OWN])
        offset = self.begin[draft] - self.begin[live]
        self.rows[row, [DRAFT, CURSOR, SOURCE, BONUS]] = draft, draft, OWN, OWN_BONUS
        self.rows[row, [OFFSET, SHIFT]] = offset

    def extend(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Append newly accepted tokens, int [sum of counts], to different rows, int64 [R]."""
        live = self.rows[rows, LIVE]
        end = self.end[live]
        self.text[spans(end, counts)] = tokens
        self.end[live] = end + counts
        is_indexed = self.indexed[rows] != NOT_YET
        # What a row says whose draft is trusted is in the draft already, but for little.
        weight = np.where(self.rows[rows, BONUS] > 0, 1 / max(len(rows), 1), 1.0)
        self._num_waiting += counts @ (weight * is_indexed)

    def index_waiting(self, count: int) -> None:
        """Index what rows have gained, if at least `count` tokens wait for it."""
        if self._num_waiting >= count:
            self.index_live()

    def index_live(self) -> None:
        """Index what rows have gained, but for n-grams that their drafts have at the same place:
        these are indexed already, and more follows them there."""
        self._num_waiting = 0.0
        begin = self.indexed[: self.num_rows]
        live, draft = self.rows[: self.num_rows, [LIVE, DRAFT]].T
        stop = np.maximum(self.end[live] - LIVE_LAG + 1, begin)
        n = len(LAST)
        grown = (stop > begin).nonzero()[0]
        which, offset = ragged((stop - begin)[grown] + n - 1)
        row = grown[which]
        last = begin[row] + offset - n  # tokens that end n-grams, and those before the first
        there = last + (self.begin[draft] - self.begin[live])[row]
        is_other = there >= self.end[draft][row] - 1
        is_other |= self.text.take(there, mode="clip") != self.text[last]
        num_others = np.append(0, is_other.cumsum())
        chosen = (offset >= n - 1).nonzero()[0]
        chosen = chosen[num_others[chosen + 1] > num_others[chosen + 1 - n]]
        self._index(last[chosen] + 1)
        self.indexed[: self.num_rows] = stop

    def propose(self, rows: np.ndarray, limits: np.ndarray) -> Proposed:
        """What may follow rows, at most `limits` tokens; int64 [R] both."""
        self.index_waiting(MAX_WAITING)
        state = self.rows[rows]
        live, draft, cursor, offset, source, asked_at, bonus, shift = state.T
        end = self.end[live]
        context = self._before[end - MAX_MATCH]
        # The continued match is the first candidate and so wins ties. If it has full length,
        # nothing can beat it and nothing is searched.
        at = end + offset
        is_open = at < self.end[cursor]
        is_own = is_open & (source == OWN)
        common = self._common(np.minimum(at, self.num_positions), context)
        # What was accepted is followed by one more token.
        gained = end - asked_at
        is_right = (common > 0) | (gained > 1)
        np.copyto(bonus, np.where(is_right, OWN_BONUS, bonus - (gained == 1)), where=is_own)
        np.maximum(bonus, 0, out=bonus)
        best = np.where(is_open & (common >= MIN_MATCH), common, NO_MATCH)
        score = best + bonus * is_own
        if len(few := (score < MAX_MATCH).nonzero()[0]):
            # A continued match of two tokens in the own draft is what the search would find, at
            # distance 0.
            needs = (draft > 0) & ((best < OWN_RADIUS[0][0]) | ~is_own)
            if len(own := few[needs[few]]):
                place = self._search_own(draft[own], context[own], (end + shift)[own])
                length = self._common(np.maximum(place, MAX_MATCH), context[own])
                is_better = (place >= 0) & (length + bonus[own] > score[own])
                own, place, length = own[is_better], place[is_better], length[is_better]
                best[own], score[own], at[own] = length, length + bonus[own], place
                cursor[own], source[own] = draft[own], OWN
            few = few[score[few] < MAX_MATCH]
            for place in self._search_group(self.group[live[few]], context[few]):
                has = place.nonzero()[0]
                if not len(has):
                    break
                place, asking = place[has], few[has]
                length = self._common(place, context[asking])
                is_better = length > score[asking]
                better, place, length = asking[is_better], place[is_better], length[is_better]
                text = self.text_at[place].astype(np.int64)
                best[better], score[better], at[better] = length, length, place
                owner, cursor[better] = self.owner[text], text
                is_sibling = (owner >= 0) & (owner != self.owner[live[better]])
                source[better] = np.where(is_sibling, SIBLING, self.kind[text])
        is_found = best >= 0
        np.subtract(at, end, out=offset)
        np.copyto(asked_at, end, where=is_found)
        np.copyto(shift, offset, where=is_found & (cursor == draft))
        self.rows[rows] = state
        count = np.where(is_found, np.minimum(limits, self.end[cursor] - at), 0)
        return Proposed(at, count, np.maximum(best, 0), np.where(is_found, source, OWN))

    def _search_own(
        self, draft: np.ndarray, context: np.ndarray, expected: np.ndarray
    ) -> np.ndarray:
        """End in the own draft, near the expected one, that continues `context`; else the expected
        one; -1 past the draft. int64 [R]."""
        first, last = self.begin[draft] + MAX_MATCH, self.end[draft] - 1
        place = expected[:, None] + DISTANCE
        is_there = (place >= first[:, None]) & (place <= last[:, None])
        place = np.where(is_there, place, first[:, None])
        for back in range(1, OWN_RADIUS[0][0] + 1):
            is_there &= (self.text[place - back] == context[:, -back, None]) | (back > NEEDED)
        row, which = np.arange(len(place)), is_there.argmax(axis=1)
        return np.where(is_there[row, which], place[row, which], -1)

    def _search_group(
        self, group: np.ndarray, context: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The two most recent ends in a row's group of its last n tokens, for the largest n with
        any; int64 [R] each, 0 for none."""
        found = self.table.find(_hash(group, context[:, LAST]))
        latest, second = (ends.reshape(len(ORDERS), len(group)) for ends in found)
        chosen = (latest > 0).argmax(axis=0), np.arange(len(group))
        return latest[chosen], second[chosen]

    def _common(self, ends: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Length of the common suffix of the texts before `ends` and a row's last MAX_MATCH tokens,
        int64 [R]. context: [R, MAX_MATCH]."""
        differs = self._before[ends - MAX_MATCH] != context
        return COMMON[np.packbits(differs, axis=1)[:, 0]]

    def _index(self, ends: np.ndarray) -> None:
        """Index ends, int64 [P], the most recent last."""
        if not len(ends):
            return
        keys = _hash(self.group[self.text_at[ends]], self.text[ends[:, None] + LAST])
        self.table.add(keys, np.tile(ends, len(ORDERS)), self._owner_of)

    def _owner_of(self, ends: np.ndarray) -> np.ndarray:
        return self.owner[self.text_at[ends]]

    def _add_text(
        self, tokens: np.ndarray, group: int, owner: int, kind: int, capacity: int
    ) -> int:
        """A text with room for `capacity` tokens; returns its number."""
        number, begin = self.num_texts, self.num_positions
        end = begin + MAX_MATCH + len(tokens)
        self.num_texts += 1
        # A position behind the text belongs to it too: that of its last end.
        self.num_positions = begin + MAX_MATCH + capacity + 1
        if number == len(self.begin):
            for name in ("begin", "end", "owner", "kind", "group"):
                setattr(self, name, doubled(getattr(self, name)))
        while self.num_positions > len(self.text):
            self.text, self.text_at = doubled(self.text), doubled(self.text_at)
            self._before = sliding_window_view(self.text, MAX_MATCH)
        self.text[begin : begin + MAX_MATCH] = PROMPT_PAD if owner == PROMPT_OWNER else PAD
        self.text[begin + MAX_MATCH : end] = tokens
        self.text_at[begin : self.num_positions] = number
        self.begin[number], self.end[number] = begin, end
        self.owner[number], self.kind[number], self.group[number] = owner, kind, group
        return number


def _hash(group: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Keys of the last n tokens of a group's texts, for each n of ORDERS in turn, uint64 [ORDERS *
    P], never 0. Two that are equal by chance cost a proposal, never a token.

    group: int64 [P]; tokens: int32 [P, max(ORDERS)], the last one first."""
    weighted = tokens.astype(np.uint64) * WEIGHTS[1:]
    sums = [np.add.reduce(weighted[:, :n], axis=1, initial=n) for n in ORDERS]
    keys = (np.array(sums) + group.astype(np.uint64) * WEIGHTS[0]).ravel()
    keys ^= keys >> np.uint64(32)
    keys *= MIX
    return (keys ^ keys >> np.uint64(29)) | np.uint64(1)
