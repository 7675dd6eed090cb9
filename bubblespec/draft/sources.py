"""Draft sources: tokens that may come next in rows.

`TextMatches` proposes a sample's own draft up to the first mismatch, and then looks for the last
tokens of the row in that draft and in other texts. Mechanisms and users add others. A source
changes time alone: the engine accepts just the tokens that a row would have sampled.

Work in a forward is done for all rows together, by array.

Shape legend: R rows, K kinds of proposals.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bubblespec.config.combinations import METHODS
from bubblespec.config.imports import call, import_path
from bubblespec.draft.store import TextStore
from bubblespec.draft.suffix import (
    HISTORY,
    HISTORY_OWNER,
    MIN_INDEXED,
    PROMPT_OWNER,
    SELF,
    SOURCE_NAMES,
    SuffixIndex,
)
from bubblespec.engine.arrays import doubled, spans
from bubblespec.errors import InputError, one_line, shown
from bubblespec.planner.survival import ALIGNED
from bubblespec.records import SOURCES
from bubblespec.types import Row

MAX_AGE = 8  # updates; older drafts are of one kind
MATCH_EDGES = np.array((2, 4, 8))  # tokens; matches between two of these lengths are of one kind


class TrackedRows:
    """The rows of a rollout that get proposals, by `Row.number`."""

    prompt_length: np.ndarray
    """int64, as all columns."""
    age: np.ndarray
    """Updates since the row's draft was extended."""
    kind: np.ndarray
    """Kind of the latest proposal."""
    in_flight: np.ndarray
    """Kind of the proposal before, plus 1; 0 if its outcome is known."""
    is_counted: np.ndarray
    """Whether the row is of this step, and so counts in `Acceptance`."""

    def __init__(self):
        self.rows: dict[int, Row] = {}
        self.texts = SuffixIndex()
        """The rows' tokens so far, and their drafts."""
        self.groups: dict[tuple[int, int], int] = {}
        """Numbers of groups in `texts` by (prompt_id, draw_index)."""
        self._set_columns(np.zeros((16, 5), np.int64))

    def _set_columns(self, columns: np.ndarray) -> None:
        self._columns = columns
        self.prompt_length, self.age, self.kind, self.in_flight, self.is_counted = columns.T

    def add(self, row: Row, age: int, is_counted: bool) -> None:
        """Add a row, with its draft if there is one."""
        number, draft = row.number, row.draft
        assert number >= 0, "the row has no number"
        while number >= len(self._columns):
            self._set_columns(doubled(self._columns))
        self._columns[number] = len(row.prompt), age, 0, 0, is_counted
        self.rows[number] = row
        group = self.groups.setdefault(row.id[:2], len(self.groups))
        drafts = [] if draft is None else [draft.tokens]
        self.texts.add_row(number, group, row.id.sample, row.max_new_tokens, *drafts)
        if len(row.tokens):
            self.texts.extend(np.array([number]), row.tokens, np.array([len(row.tokens)]))

    def propose(self, numbers: np.ndarray, kind: np.ndarray, in_flight: np.ndarray) -> None:
        """Note kinds of proposals, by row; in_flight: tokens that may be gained in flight."""
        self.in_flight[numbers] = np.where(in_flight > 0, self.kind[numbers] + 1, 0)
        self.kind[numbers] = kind

    def take_kind(self, numbers: np.ndarray) -> np.ndarray:
        """Return the kinds of the earliest proposals of rows without an outcome, int64 [R]."""
        before = self.in_flight[numbers]
        self.in_flight[numbers] = 0
        return np.where(before > 0, before - 1, self.kind[numbers])


class Proposals(NamedTuple):
    """Tokens that may come next in R rows."""

    tokens: np.ndarray  # int, the proposals of all rows
    begin: np.ndarray  # int64 [R], begin of each row's proposal in `tokens`
    count: np.ndarray  # type: ignore[assignment]  # tuple.count is not used
    """int64 [R], tokens of each row's proposal; 0 for none."""
    kind: np.ndarray  # int64 [R], numbers in the source's `kinds`


class DraftSource:
    """A source of draft tokens; by default it proposes nothing.

    It is queried for rows without a proposal from the sources before it, and for rows whose
    proposal is accepted less often than `chance`."""

    # Kinds of proposals, (name of the source, length of the match, age, ...), whose acceptance is
    # measured apart.
    kinds: Sequence[tuple] = ()
    is_enabled = True  # whether the source is queried and gets new tokens
    chance = 0.0  # acceptance rate below which another source's proposal is replaced
    is_last = False  # whether sources that are added later are asked before it
    needs_results = False  # whether it proposes behind the latest tokens alone, none in flight
    problem: str | None = None  # why it proposes no more, on this rank
    path: str | None = None  # dotted path of a user's source, whose proposals are checked
    vocab_size: int | None = None  # number of the policy's tokens, for that check

    def begin(self, tracked: TrackedRows) -> None:
        """Begin a rollout, whose rows will be in `tracked`: forget all others."""
        self.tracked = tracked

    def serves(self, engine) -> bool:
        """Whether it may propose for the rows of an `Engine`."""
        return True

    def track(self, number: int) -> None:
        """Propose for a row from now on.

        The row may have tokens already. It may have been tracked before, by another number
        and with other tokens."""

    def propose(self, numbers: np.ndarray, limits: np.ndarray) -> Proposals:
        """Return what may come next in rows, at least one.

        limits: maximum number of tokens of each, at least 1. numbers, limits: int64 [R]."""
        return Proposals(numbers, *np.zeros((3, len(numbers)), np.int64))

    def observe(self, numbers: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Learn new tokens, int [sum of counts], of different rows. numbers, counts: int64 [R]."""

    def catch_up(self) -> None:
        """Do work that can wait, while a GPU computes."""


def load_source(path: str, vocab_size: int | None) -> DraftSource:
    """Create a user's source, a DraftSource made without arguments; raise InputError."""
    key = "speculative.method"
    made = import_path(key, path, "my_module.MySource")
    if not isinstance(made, type) or not issubclass(made, DraftSource):
        raise InputError(f"{key}: {path} is not a subclass of {DraftSource.__module__}.DraftSource")
    try:
        source = call(made)
    except Exception as error:  # the user's own code
        raise InputError(f"{key}: {path}() failed: {one_line(error)}") from error
    kinds = source.kinds
    if not kinds or not all(isinstance(kind, tuple) and kind for kind in kinds):
        raise InputError(f"{key}: {path}.kinds must be tuples that begin with a name, not {kinds}")
    for name, *_ in kinds:
        if not isinstance(name, str) or name in (*SOURCES, *METHODS):
            problem = f"{name!r} is reserved for the built-in sources"
            raise InputError(f"{key}: {path}.kinds: {problem}; choose another name")
    for kind in kinds:  # checkpoints keep them as JSON
        if not all(type(part) in (str, int, float, bool) for part in kind):
            raise InputError(f"{key}: {path}.kinds: {kind!r} must be of Python strings and numbers")
    source.path, source.vocab_size = path, vocab_size
    return source


def check_proposals(source: DraftSource, found: Proposals, limits: np.ndarray) -> None:
    """Raise InputError for proposals of a user's source that cannot be fed.

    limits: int64 [R], see `DraftSource.propose`."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise InputError(f"speculative.method: {source.path}.propose returned {what}")

    require(isinstance(found, Proposals), f"{shown(found)}, not Proposals")
    for name, column in found._asdict().items():
        is_int = isinstance(column, np.ndarray) and np.issubdtype(column.dtype, np.integer)
        require(is_int, f"{name} that is not an integer array")
        wanted = column.shape if name == "tokens" else limits.shape
        require(column.ndim == 1 and column.shape == wanted, f"{name} of {list(column.shape)}")
    tokens, begin, count, kind = found
    is_within = (count >= 0) & (count <= limits)
    require(bool(is_within.all()), "a negative count, or one above its limit")
    begin, end = begin[count > 0], (begin + count)[count > 0]
    require(bool(((begin >= 0) & (end <= len(tokens))).all()), "a range beyond its tokens")
    is_kind = (kind >= 0) & (kind < len(source.kinds))
    require(bool(is_kind.all()), f"a kind that is not below {len(source.kinds)}, as its kinds are")
    ids = tokens[spans(begin, end - begin)]
    size = np.inf if source.vocab_size is None else source.vocab_size
    require(bool(((ids >= 0) & (ids < size)).all()), f"tokens outside of the vocabulary of {size}")


class TextMatches(DraftSource):
    """A row's own draft, made with the same noise, as long as the row follows it.

    Behind that, and without one: continuations of the row's last tokens in its draft, group, prompt
    or earlier responses. A group's texts are indexed at the first search in it."""

    kinds = (
        *((ALIGNED, age) for age in range(MAX_AGE + 1)),
        *((name, n) for name in SOURCE_NAMES for n in range(len(MATCH_EDGES) + 1)),
    )

    def __init__(self, history: TextStore, searches: bool = True):
        """Create the source; searches: whether it proposes anything but own drafts."""
        self.history, self.searches = history, searches

    def begin(self, tracked: TrackedRows) -> None:
        """Forget rows and groups; the history stays."""
        super().begin(tracked)
        self._indexed: set[int] = set()  # groups

    def track(self, number: int) -> None:
        """Match against the row's draft and tokens from now on."""
        if self.tracked.groups[self.tracked.rows[number].id[:2]] in self._indexed:
            self.tracked.texts.start_indexing(number)

    def propose(self, numbers: np.ndarray, limits: np.ndarray) -> Proposals:
        """Return the next tokens of drafts, and what follows the longest matches."""
        texts, kind = self.tracked.texts, self.tracked.age[numbers]
        begin, left = texts.in_draft(numbers)
        count = np.minimum(left, limits) * texts.is_aligned[numbers]
        if self.searches and len(some := (count == 0).nonzero()[0]):
            rows = numbers[some]
            for group in texts.unindexed(rows):
                self._index_group(group)
            begin[some], count[some], match, source = texts.propose(rows, limits[some])
            reached = MATCH_EDGES.searchsorted(match, side="right")
            kind[some] = MAX_AGE + 1 + source * (len(MATCH_EDGES) + 1) + reached
        return Proposals(texts.text, begin, count, kind)

    def catch_up(self) -> None:
        """Index the tokens that rows have gained; a query does so if many wait."""
        self.tracked.texts.index_waiting(MIN_INDEXED)

    def _index_group(self, group: int) -> None:
        self._indexed.add(group)
        texts = self.tracked.texts
        members = texts.unindexed_rows(group)
        first = self.tracked.rows[members[0]]
        # By reward, then recency: later texts are trusted more.
        earlier = sorted(self.history.of_prompt(first.id.prompt_id), key=lambda text: text.reward)
        of_group = [*(text.tokens for text in earlier), np.array(first.prompt, np.int32)]
        kinds = [HISTORY] * len(earlier) + [SELF]
        owners = [HISTORY_OWNER] * len(earlier) + [PROMPT_OWNER]
        texts.add_texts(of_group, group, owners, kinds)
        for number in members:
            texts.start_indexing(number)
