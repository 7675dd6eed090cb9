"""Draft tokens by suffix matching: propose what followed a row's last tokens elsewhere.

After prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and SuffixDecoding
(Oliaro et al. 2024, arXiv 2411.04975), over the texts of a group of samples. docs/lab/LOG.md
compares the three.

Sources, most trusted first: the row's own draft (made with the same noise under older weights), the
other samples of its group (their drafts, and their tokens so far), its own earlier tokens, the
prompt, and responses of earlier epochs. The longest match wins and trust breaks ties; a match in
the own draft near its expected place counts for more, see `OWN_BONUS`.

All texts of a rollout lie in one array, each behind padding that stands for the prompt, so that two
responses of a group match in full length from their first token on. A query looks up a fixed number
of n-grams for all rows at once, and none for a row whose last proposal was accepted with a match of
full length.

An "end" is the position in the array where a match ends and its continuation begins.

Shape legend: R rows, P ends.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bubblespec.engine.arrays import doubled, ragged, spans
from bubblespec.records import SOURCES

# Source of a proposal: own draft, other sample, prompt or own tokens, earlier epoch.
OWN, SIBLING, SELF, HISTORY = range(4)
SOURCE_NAMES = SOURCES[1:5]

PAD = -1  # never a token
PROMPT_PAD = -2  # before the prompt: responses do not begin where the prompt begins
PROMPT_OWNER, HISTORY_OWNER = -1, -2  # never a sample
MIN_MATCH = 2  # tokens; shortest match outside the own draft
MAX_MATCH = 8  # longer matches count as equal
# Sizes of the indexed n-grams, largest first. A query takes the most recent end for the largest n
# that has any. These two sizes yield as much as all sizes from 8 down to 2.
ORDERS = (6, MIN_MATCH)
# A match near its expected place in the own draft counts this many tokens longer, and one less for
# each consecutive proposal without an accepted token, so that a diverged draft loses its bonus.
# Measured on outdated drafts of two policies: within 4% of the tokens per forward of the best fixed
# bonus, 6 on running sums and 0 on free text; the wrong fixed bonus costs 4 to 21%.
OWN_BONUS = 6
# (n, distance): maximum distance from the expected place at which the own draft is searched for the
# last n tokens, largest n first; n = 0 is the expected place itself. One token shows an insertion
# or deletion. A wider search finds repeated words and measured worse.
OWN_RADIUS = ((2, 4), (1, 1), (0, 0))
# Live tokens are indexed with this lag: the most recent end of an n-gram hides older ones, which is
# a loss while hardly any tokens follow it.
LIVE_LAG = 8
# Live tokens indexed at once, per row where drafts are trusted: at least while a GPU computes, and
# at most in a query.
MIN_INDEXED, MAX_WAITING = 16, 24
# Candidates of the search in the own draft, best first: distance (0, 1, -1, 2, ...) and tokens.
CANDIDATES = [
    (distance, n)
    for n, radius in OWN_RADIUS
    for distance in sorted(range(radius, -radius - 1, -1), key=abs)
]
DISTANCE, NEEDED = np.array(CANDIDATES).T
# Length of the common suffix by a byte whose bits say which of the last eight tokens differ.
COMMON = np.array([MAX_MATCH, *((bits & -bits).bit_length() - 1 for bits in range(1, 256))])
NO_MATCH = -(1 << 20)  # less than any match with its bonus
LAST = -np.arange(1, max(ORDERS) + 1)  # offsets of an n-gram's tokens, last one first
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, as in Knuth's hashing
WEIGHTS = np.cumprod(np.full(len(LAST) + 1, MIX))  # for the group and the tokens of an n-gram
NOTHING = np.empty(0, np.int32)
NOT_YET = np.iinfo(np.int64).max // 2  # an end that no text has
LIVE, DRAFT, CURSOR, OFFSET, SOURCE, ASKED_AT, BONUS, SHIFT = range(8)  # columns, see SuffixIndex


class NgramTable:
    """The two latest ends of each n-gram of a group, with different owners.

    At most one of them is in the querying row's own text. A hash table with linear probing."""

    def __init__(self):
        self._clear(1 << 12)

    def _clear(self, capacity: int) -> None:
        self.keys = np.zeros(capacity, np.uint64)  # hashes of n-grams; 0: free
        self.latest, self.second = np.zeros((2, capacity), np.int64)  # ends, 0 for none
        self.num_added = 0

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the most recent ends and the second ones, int64 [keys] each; 0 for none."""
        slots = self._slots(keys, adds=False)
        return self.latest[slots], self.second[slots]

    def add(self, keys: np.ndarray, ends: np.ndarray, owner_of: Callable) -> None:
        """Add ends of n-grams, the most recent last. owner_of: returns the owners of ends."""
        if 2 * (self.num_added + len(keys)) > len(self.keys):
            self._grow(len(keys))
        self.num_added += len(keys)
        slots = self._slots(keys, adds=True)
        before = self.latest[slots]
        self.latest[slots] = ends  # the last end of equal slots stays
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
        """Return the slots of keys, int64 [keys]; a free slot for a missing key."""
        mask = len(self.keys) - 1
        slots = (keys >> np.uint64(20)).astype(np.int64) & mask
        left = np.arange(len(keys))  # indices of unsettled keys
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
    """Texts, rows and groups of a rollout, all by number. Rows match within their group alone.

    A row's length is that of its text here."""

    def __init__(self):
        self.text, self.text_at = np.zeros((2, 1 << 12), np.int32)  # tokens; number of their text
        self._before = sliding_window_view(self.text, MAX_MATCH)
        self.num_positions = 0
        self.num_texts = 0
        # By text: begin, padding included; end; sample or owner; source; group.
        self.begin, self.end, self.owner, self.kind, self.group = np.zeros((5, 16), np.int64)
        # By row, in columns: LIVE, the row's text; DRAFT, the draft's text. Of the last proposal:
        # CURSOR, its text; OFFSET, its end there minus the end of the row's text, as both move on
        # together; SOURCE; ASKED_AT, the end of the row's text then. BONUS, see OWN_BONUS; SHIFT,
        # the expected end in the draft minus the end of the row's text. Text 0 is empty: none.
        self.rows = np.zeros((16, 8), np.int64)
        self.indexed = np.zeros(16, np.int64)  # the next end to index
        self.is_aligned = np.zeros(16, bool)
        """Whether the row has followed its draft from the start."""
        self.table = NgramTable()
        self._num_waiting = 0.0  # live tokens to index
        self._add_text(NOTHING, -1, HISTORY_OWNER, HISTORY, 0)
        self.end[0] = 0  # no end is before it

    def add_texts(
        self, texts: Sequence[np.ndarray], group: int, owners: Sequence[int], kinds: Sequence[int]
    ) -> list[int]:
        """Add texts that do not grow, int [L] each, the most trusted last; return numbers."""
        numbers = [
            self._add_text(tokens, group, owner, kind, len(tokens))
            for tokens, owner, kind in zip(texts, owners, kinds, strict=True)
        ]
        begin = self.begin[numbers] + MAX_MATCH
        self._index(spans(begin, self.end[numbers] - begin))
        return numbers

    def add_row(
        self, row: int, group: int, sample: int, max_tokens: int, draft: np.ndarray = NOTHING
    ) -> None:
        """Add a row of up to `max_tokens` tokens, with its draft, int [L]; neither is indexed yet.

        The draft is aligned with the response."""
        while row >= len(self.rows):
            for name in ("rows", "indexed", "is_aligned"):
                setattr(self, name, doubled(getattr(self, name)))
        live = self._add_text(NOTHING, group, sample, SELF, max_tokens)
        self.rows[row, [LIVE, ASKED_AT]] = live, self.end[live]
        self.indexed[row] = NOT_YET
        if len(draft):
            number = self._add_text(draft, group, sample, OWN, len(draft))
            self.rows[row, [DRAFT, CURSOR, SOURCE, BONUS]] = number, number, OWN, OWN_BONUS
            self.rows[row, [OFFSET, SHIFT]] = self.begin[number] - self.begin[live]
            self.is_aligned[row] = True

    def start_indexing(self, row: int) -> None:
        """Let rows of the group match in a row's draft and tokens from now on."""
        draft, live = self.rows[row, [DRAFT, LIVE]]
        self._index(np.arange(self.begin[draft] + MAX_MATCH, self.end[draft]))
        self.indexed[row] = self.begin[live] + MAX_MATCH
        self._num_waiting += self.end[live] - self.indexed[row]

    def unindexed(self, rows: np.ndarray) -> set[int]:
        """Return the groups of those of the rows, int64 [R], that are not indexed yet."""
        lacking = rows[self.indexed[rows] == NOT_YET]
        return set(self.group[self.rows[lacking, LIVE]].tolist())

    def unindexed_rows(self, group: int) -> list[int]:
        """Return the rows of a group that are not indexed yet."""
        is_member = self.group[self.rows[:, LIVE]] == group
        return np.flatnonzero(is_member & (self.indexed == NOT_YET)).tolist()

    def in_draft(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where rows' ends are in their drafts, and how many tokens follow, int64 [R] each.

        Not positive for a row that has outgrown its draft, or has none."""
        live, draft = self.rows[rows, LIVE], self.rows[rows, DRAFT]
        place = self.end[live] + self.begin[draft] - self.begin[live]
        return place, self.end[draft] - place

    def extend(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Append newly accepted tokens, int [sum of counts], to different rows, int64 [R]."""
        live = self.rows[rows, LIVE]
        end = self.end[live]
        if (is_aligned := self.is_aligned[rows]).any():
            place, left = self.in_draft(rows)
            is_other = self.text.take(spans(place, counts), mode="clip") != tokens
            is_aligned &= counts <= left
            is_aligned[np.arange(len(counts)).repeat(counts)[is_other]] = False
            self.is_aligned[rows] = is_aligned
        self.text[spans(end, counts)] = tokens
        self.end[live] = end + counts
        is_indexed = self.indexed[rows] != NOT_YET
        # Most tokens of a row with a trusted draft are in the draft already.
        weight = np.where(self.rows[rows, BONUS] > 0, 1 / max(len(rows), 1), 1.0)
        self._num_waiting += counts @ (weight * is_indexed)

    def index_waiting(self, count: int) -> None:
        """Index new tokens of rows, if at least `count` wait."""
        if self._num_waiting >= count:
            self.index_live()

    def index_live(self) -> None:
        """Index new tokens of rows, without n-grams that the row's draft has at the same place.

        These are indexed already, and more tokens follow them there."""
        self._num_waiting = 0.0
        begin = self.indexed
        live, draft = self.rows[:, [LIVE, DRAFT]].T
        stop = np.maximum(self.end[live] - LIVE_LAG + 1, begin)
        n = len(LAST)
        grown = (stop > begin).nonzero()[0]
        which, offset = ragged((stop - begin)[grown] + n - 1)
        row = grown[which]
        last = begin[row] + offset - n  # last tokens of n-grams, and the tokens before the first
        there = last + (self.begin[draft] - self.begin[live])[row]
        is_other = there >= self.end[draft][row] - 1
        is_other |= self.text.take(there, mode="clip") != self.text[last]
        num_others = np.append(0, is_other.cumsum())
        chosen = (offset >= n - 1).nonzero()[0]
        chosen = chosen[num_others[chosen + 1] > num_others[chosen + 1 - n]]
        self._index(last[chosen] + 1)
        self.indexed = stop

    def propose(
        self, rows: np.ndarray, limits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return what may follow rows, at most `limits` tokens each. rows, limits: int64 [R].

        Begin in `text` and number of tokens; length of the common suffix of row and source, up to
        MAX_MATCH, below MIN_MATCH for OWN alone, 0 where the draft continues at its expected place,
        as after one replaced token; source, OWN to HISTORY. All int64 [R]."""
        self.index_waiting(MAX_WAITING)
        state = self.rows[rows]
        live, draft, cursor, offset, source, asked_at, bonus, shift = state.T
        end = self.end[live]
        context = self._before[end - MAX_MATCH]
        # The continued match is the first candidate, so it wins ties. No search can beat full
        # length.
        at = end + offset
        is_open = at < self.end[cursor]
        is_own = is_open & (source == OWN)
        common = self._common(np.minimum(at, self.num_positions), context)
        # A forward adds one token to the accepted ones.
        gained = end - asked_at
        is_right = (common > 0) | (gained > 1)
        np.copyto(bonus, np.where(is_right, OWN_BONUS, bonus - (gained == 1)), where=is_own)
        np.maximum(bonus, 0, out=bonus)
        best = np.where(is_open & (common >= MIN_MATCH), common, NO_MATCH)
        score = best + bonus * is_own
        if len(few := (score < MAX_MATCH).nonzero()[0]):
            # The search would find a continued match of two tokens in the own draft at distance 0.
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
        return at, count, np.maximum(best, 0), np.where(is_found, source, OWN)

    def _search_own(
        self, draft: np.ndarray, context: np.ndarray, expected: np.ndarray
    ) -> np.ndarray:
        """Return the end in the own draft nearest the expected one that continues `context`.

        int64 [R]; without any the expected end itself, -1 past the draft."""
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
        """Return the two latest ends of each row's last n tokens in its group, for the largest n.

        int64 [R] each, 0 for none."""
        found = self.table.find(_hash(group, context[:, LAST]))
        latest, second = (ends.reshape(len(ORDERS), len(group)) for ends in found)
        chosen = (latest > 0).argmax(axis=0), np.arange(len(group))
        return latest[chosen], second[chosen]

    def _common(self, ends: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Return lengths of common suffixes of texts up to `ends` and contexts [R, MAX_MATCH]."""
        differs = self._before[ends - MAX_MATCH] != context
        return COMMON[np.packbits(differs, axis=1)[:, 0]]

    def _index(self, ends: np.ndarray) -> None:
        """Index ends, int64 [P], the most recent last."""
        if not len(ends):
            return
        keys = _hash(self.group[self.text_at[ends]], self.text[ends[:, None] + LAST])
        self.table.add(keys, np.tile(ends, len(ORDERS)), lambda at: self.owner[self.text_at[at]])

    def _add_text(
        self, tokens: np.ndarray, group: int, owner: int, kind: int, capacity: int
    ) -> int:
        """Add a text with room for `capacity` tokens. Return its number."""
        number, begin = self.num_texts, self.num_positions
        end = begin + MAX_MATCH + len(tokens)
        self.num_texts += 1
        # The position behind the text belongs to it too: it is the last end.
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
    """Return keys of the last n tokens of texts for each n of ORDERS, uint64 [ORDERS * P], not 0.

    group: int64 [P]; tokens: int32 [P, max(ORDERS)], the last one first. A collision costs a
    proposal, never a token."""
    weighted = tokens.astype(np.uint64) * WEIGHTS[1:]
    sums = [np.add.reduce(weighted[:, :n], axis=1, initial=n) for n in ORDERS]
    keys = (np.array(sums) + group.astype(np.uint64) * WEIGHTS[0]).ravel()
    keys ^= keys >> np.uint64(32)
    keys *= MIX
    return (keys ^ keys >> np.uint64(29)) | np.uint64(1)
