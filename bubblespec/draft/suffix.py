"""Draft tokens by suffix matching: where the last tokens of a row's response occurred before,
propose what followed there.

After prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding) and SuffixDecoding
(Oliaro et al. 2024, arXiv 2411.04975), over the texts of a group of samples. docs/LOG.md compares
the three.

Sources, most trusted first: the row's own draft (made with the same noise under older weights), the
other samples of its group (their drafts, and their tokens so far), its own earlier tokens, the
prompt, and responses of earlier epochs. The longest match wins and trust breaks ties; a match in
the own draft near its expected place counts for more, see `OWN_BONUS`.

Texts are little-endian int32 tokens in `bytes`, because three operations at C speed then do all the
work: a slice is an n-gram that can be a dict key, `find` is a search, and the XOR of two slices as
integers gives the length of their common suffix. Such a length is exact; hashes are never compared
in place of tokens. Every text begins with padding that stands for the prompt. All texts of a group
follow the same prompt, so two responses that agree from their first token on match in full length,
at position 0 as well.

Cost: a proposal looks up a fixed number of n-grams, however long the texts are, and none where the
last proposal was accepted and its match has full length.

All positions, lengths and distances are in tokens. An "end" is the position in a padded text where
a match ends and its continuation begins.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from bubblespec.records import SOURCES

# Source of a proposal: own draft, other sample, prompt or own tokens, earlier epoch.
OWN, SIBLING, SELF, HISTORY = range(4)
SOURCE_NAMES = SOURCES[1:]

PAD = -1  # never a token
PROMPT_PAD = -2  # in front of the prompt, whose beginning is not the place where responses begin
PROMPT_OWNER, HISTORY_OWNER = -1, -2  # never a sample
TOKEN_BYTES = 4
MIN_MATCH = 2  # tokens; shortest match outside the own draft
MAX_MATCH = 8  # longer matches count as equal
# Sizes of the indexed n-grams, largest first: of all places that share the row's last n tokens, for
# the largest such n, the most recent is taken. These yield as much as all sizes from 8 down to 2.
ORDERS = (6, MIN_MATCH)
SIZES = tuple(TOKEN_BYTES * n for n in ORDERS)
WINDOW = TOKEN_BYTES * MAX_MATCH
END_BITS = 32  # an indexed place is text id << END_BITS | end
END_MASK = (1 << END_BITS) - 1
# A match near its expected place in the own draft is more likely right than its length says: it
# counts this many tokens longer, and one less for every consecutive proposal of which nothing was
# accepted, so that a diverged draft loses its bonus. Measured on outdated drafts of two policies:
# tokens per forward stay within 4% of the best fixed bonus, which is 6 on running sums and 0 on
# free text, where the wrong one costs 4 to 21%.
OWN_BONUS = 6
# (n, distance): how far from its expected place the last n tokens are searched in the own draft,
# largest n first. One token is enough to detect that one was inserted or deleted. A wider search
# finds repetitions of the same words and measured worse; matches further away are found like those
# in siblings, without the bonus.
OWN_RADIUS = ((2, 4), (1, 1))
# Live tokens are indexed this far behind their end: the most recent place of an n-gram hides older
# ones, which is a loss as long as hardly any tokens follow it.
LIVE_LAG = 8
NOTHING = np.empty(0, np.int32)
PADDING = np.full(MAX_MATCH, PAD, np.int32).tobytes()


def find_nearest(text: bytes, ngram: bytes, centre: int, radius: int) -> int:
    """End of the occurrence of `ngram` nearest to `centre`: at most `radius` away, not in the
    padding, and with a token after it. Of two equally near ones the later; -1 if there is none."""
    last = len(text) // TOKEN_BYTES - 1
    for distance in range(radius + 1):
        for end in (centre + distance, centre - distance):
            stop = TOKEN_BYTES * end
            if MAX_MATCH <= end <= last and text[stop - len(ngram) : stop] == ngram:
                return end
    return -1


class _Row:
    """A live row: its tokens so far, its draft, and where its last proposal was taken from."""

    def __init__(self, live_id: int):
        self.text = bytearray(PADDING)
        self.live_id = live_id
        # the end of `text`: all that is not indexed yet, and MAX_MATCH tokens before it
        self.recent = PADDING
        self.indexed = MAX_MATCH  # the next end to index
        self.draft = b""
        self.bonus = OWN_BONUS  # tokens that a match in the draft counts longer than it is
        self.shift = 0  # expected end in the draft, minus the end of `text`
        self.cursor: bytes | bytearray = b""  # text of the last proposal
        self.at = 0  # its end there, minus the end of `text`: both move on together
        self.source = OWN
        self.end = 0  # end of `text` at that time


class GroupIndex:
    """All that can propose tokens for the samples of one prompt in one visit."""

    def __init__(
        self, history: Iterable[tuple[np.ndarray, float]] = (), *, prompt: Sequence[int] = ()
    ):
        """history: (int tokens [L], reward) of earlier responses, most recent first; preferred by
        reward, then recency. prompt: tokens; matches in it count as SELF."""
        self.rows: dict[int, _Row] = {}
        # By text id: the text, the sample it belongs to, and which source it is for that sample.
        self.texts: list[bytes | bytearray] = []
        self.owners: list[int] = []
        self.kinds: list[int] = []
        # The two most recent places of an n-gram in the group, of different samples: at most one is
        # in the asking row's own text.
        self.latest: dict[bytes, int] = {}
        self.second: dict[bytes, int] = {}
        # Most trusted last, since what is indexed later replaces what was there.
        oldest_first = list(history)[::-1]
        for tokens, _ in sorted(oldest_first, key=lambda pair: pair[1]):
            self._add_text(_pad(tokens), HISTORY_OWNER, HISTORY)
        if prompt:
            text = np.array((PROMPT_PAD,) * MAX_MATCH + tuple(prompt), np.int32).tobytes()
            self._add_text(text, PROMPT_OWNER, SELF)

    def add_draft(self, sample: int, tokens: np.ndarray) -> None:
        """Give `sample` a draft, int [L], aligned with its response, in place of any it had. Its
        siblings match into it too."""
        row = self._row(sample)
        row.draft, row.shift = _pad(tokens), 0
        row.cursor, row.at, row.source, row.bonus = row.draft, 0, OWN, OWN_BONUS
        self._add_text(row.draft, sample, OWN)

    def extend(self, sample: int, tokens: np.ndarray) -> None:
        """Append newly accepted tokens, int [A], to a live row."""
        row = self._row(sample)
        data = tokens.astype(np.int32).tobytes()
        row.text += data
        recent = row.recent + data
        end = len(row.text) // TOKEN_BYTES
        stop = max(end - LIVE_LAG + 1, row.indexed)
        self._index(recent, row.live_id, row.indexed, stop, offset=end - len(recent) // TOKEN_BYTES)
        row.indexed = stop
        row.recent = recent[-(WINDOW + TOKEN_BYTES * (end - stop)) :]

    def propose(self, sample: int, max_tokens: int) -> tuple[np.ndarray, int, int]:
        """Tokens that may follow a row, int32 [0..max_tokens], the match length behind them, and
        their source.

        The match length is the number of last tokens, up to MAX_MATCH, in which row and source
        agree. It is below MIN_MATCH for OWN only; 0 means that the draft continues at its expected
        place, as it does after one replaced token.
        """
        row = self._row(sample)
        context = row.recent[-WINDOW:]
        wanted = int.from_bytes(context, "little")
        end = len(row.text) // TOKEN_BYTES
        # The continued match is the first candidate and so wins ties. If it has full length,
        # nothing can beat it and nothing is searched.
        best, score, text, at, source = -1, -1, row.cursor, row.at + end, row.source
        if TOKEN_BYTES * at < len(text):
            common = _common(text, at, wanted)
            if source == OWN and end > row.end:  # what was accepted is followed by one more token
                row.bonus = OWN_BONUS if common or end > row.end + 1 else max(row.bonus - 1, 0)
            if common >= MIN_MATCH:
                best, score = common, common + row.bonus if source == OWN else common
        # A continued match of two tokens in the own draft is what the search would find, at
        # distance 0.
        if score < MAX_MATCH and row.draft and (best < OWN_RADIUS[0][0] or source != OWN):
            place = self._search_own(row.draft, context, end + row.shift)
            if place >= 0:
                common = _common(row.draft, place, wanted)
                if common + row.bonus > score:
                    best, score = common, common + row.bonus
                    text, at, source = row.draft, place, OWN
        if score < MAX_MATCH:
            for place in self._search_group(context):
                text_id = place >> END_BITS
                other = self.texts[text_id]
                common = _common(other, place & END_MASK, wanted)
                if common > score:
                    best, score, text, at = common, common, other, place & END_MASK
                    is_sibling = 0 <= self.owners[text_id] != sample
                    source = SIBLING if is_sibling else self.kinds[text_id]
        if best < 0:
            return NOTHING, 0, OWN
        row.cursor, row.at, row.source, row.end = text, at - end, source, end
        if source == OWN and text is row.draft:
            row.shift = at - end
        # A copy: a view would prevent a live text from growing.
        data = bytes(text[TOKEN_BYTES * at : TOKEN_BYTES * (at + max_tokens)])
        return np.frombuffer(data, np.int32), best, source

    def _search_own(self, draft: bytes, context: bytes, expected: int) -> int:
        """End in the own draft, near the expected one, that continues `context`; else the expected
        one; -1 past the draft."""
        reach = OWN_RADIUS[0][1]
        begin, stop = max(expected - reach - 1, 0), expected + reach
        # Mostly it is not there, and this is far cheaper than the search.
        if context[-TOKEN_BYTES:] in draft[TOKEN_BYTES * begin : TOKEN_BYTES * stop]:
            for n, radius in OWN_RADIUS:
                at = find_nearest(draft, context[-TOKEN_BYTES * n :], expected, radius)
                if at >= 0:
                    return at
        return expected if expected < len(draft) // TOKEN_BYTES else -1

    def _search_group(self, context: bytes) -> tuple[int, ...]:
        for size in SIZES:
            ngram = context[-size:]
            place = self.latest.get(ngram)
            if place is not None:
                other = self.second.get(ngram)
                return (place,) if other is None else (place, other)
        return ()

    def _index(self, text: bytes, text_id: int, begin: int, stop: int, *, offset: int = 0) -> None:
        """Index the n-grams that end at begin .. stop - 1. offset: position of the first token of
        `text` in the whole text."""
        latest, second, owners = self.latest, self.second, self.owners
        owner = owners[text_id]
        for end in range(begin, stop):
            here = TOKEN_BYTES * (end - offset)
            for size in SIZES:
                ngram = text[here - size : here]
                previous = latest.get(ngram)
                if previous is not None and owners[previous >> END_BITS] != owner:
                    second[ngram] = previous
                latest[ngram] = text_id << END_BITS | end

    def _row(self, sample: int) -> _Row:
        row = self.rows.get(sample)
        if row is None:
            row = self.rows[sample] = _Row(len(self.texts))
            self._register(row.text, sample, SELF)
        return row

    def _add_text(self, text: bytes, owner: int, kind: int) -> None:
        """A text that does not grow."""
        text_id = self._register(text, owner, kind)
        self._index(text, text_id, MAX_MATCH, len(text) // TOKEN_BYTES)

    def _register(self, text: bytes | bytearray, owner: int, kind: int) -> int:
        self.texts.append(text)
        self.owners.append(owner)
        self.kinds.append(kind)
        return len(self.texts) - 1


def _pad(tokens: np.ndarray) -> bytes:
    return PADDING + tokens.astype(np.int32).tobytes()


def _common(text: bytes | bytearray, end: int, wanted: int) -> int:
    """Length of the common suffix of text[:end] and the row's last MAX_MATCH tokens, given as the
    integer `wanted`."""
    there = int.from_bytes(text[TOKEN_BYTES * end - WINDOW : TOKEN_BYTES * end], "little")
    return MAX_MATCH - ((there ^ wanted).bit_length() + 31 >> 5)


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
        """(int32 tokens [L], reward) of a prompt, most recent first, as `GroupIndex` takes them."""
        return list(self.entries.get(uid, ()))[::-1]

    def state_dict(self) -> dict[str, np.ndarray]:
        """N responses of T tokens in all, oldest first: uid, length int64 [N], reward float64 [N],
        tokens int32 [T]."""
        parts = {uid: iter(entries) for uid, entries in self.entries.items()}
        entries = [next(parts[uid]) for uid in self.order]
        return {
            "uid": np.array(self.order, np.int64),
            "length": np.array([len(tokens) for tokens, _ in entries], np.int64),
            "reward": np.array([reward for _, reward in entries], np.float64),
            "tokens": np.concatenate([NOTHING, *(tokens for tokens, _ in entries)]),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Take over a saved state. Under a smaller bound its oldest responses are dropped."""
        self.entries.clear()
        self.order.clear()
        self.num_tokens = 0
        texts = np.split(state["tokens"], np.cumsum(state["length"])[:-1])
        for uid, tokens, reward in zip(state["uid"].tolist(), texts, state["reward"], strict=False):
            self.add(uid, tokens, reward)
