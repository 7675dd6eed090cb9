"""Suffix drafts against a brute-force search, resynchronisation, preferences, bounded history."""

import itertools

import numpy as np
import pytest

from bubblespec.draft.suffix import (
    HISTORY,
    LIVE_LAG,
    ORDERS,
    OWN,
    OWN_BONUS,
    OWN_RADIUS,
    SELF,
    SIBLING,
    SuffixIndex,
)
from tests.helpers.suffix import GroupIndex

PAD = [-1] * 8


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def random_events(
    rng: np.random.Generator, alphabet: int, samples: int = 3, count: int = 40
) -> list[tuple[str, int, np.ndarray]]:
    """Return events of a group: drafts, then rows that grow by a few tokens, often as drafted."""
    drafted = [j for j in range(samples) if rng.random() < 0.7]
    drafts = {j: rng.integers(alphabet, size=rng.integers(0, 40)) for j in drafted}
    events, lengths = [("draft", *item) for item in drafts.items()], [0] * samples
    for _ in range(count):
        j, size = int(rng.integers(samples)), int(rng.integers(0, 5))
        tokens = rng.integers(alphabet, size=size)
        right = drafts.get(j, tokens[:0])[lengths[j] :][: size if rng.random() < 0.8 else 0]
        tokens[: len(right)] = right
        lengths[j] += size
        events.append(("extend", j, tokens))
    return events


def build(events, history=(), prompt=()) -> GroupIndex:
    index = GroupIndex(history, prompt=prompt)
    for kind, sample, tokens in events:
        (index.row if kind == "draft" else index.extend)(sample, tokens)
    return index


def common_suffix(a: list[int], b: list[int], most: int = 8) -> int:
    length = 0
    while length < min(most, len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def brute_force(events, history, sample: int, limit: int, prompt=()) -> tuple[list[int], int, int]:
    """Return the first proposal for a row, by plain search through everything."""
    texts, places = [], []  # (tokens, owner, kind); (text number, end) as they became searchable

    def add(text: list[int], owner: int, kind: int) -> list[int]:
        places.extend((len(texts), end) for end in range(8, len(text)))
        texts.append((text, owner, kind))
        return text

    latest_first = history[::-1]  # of equal rewards the latest comes first
    for text, _ in sorted(latest_first, key=lambda item: item[1]):
        add(PAD + text.tolist(), -2, HISTORY)
    add([-2] * 8 + list(prompt), -1, SELF)
    live, drafts, draft, row = {}, {}, None, list(PAD)
    for kind, j, tokens in events:
        if kind == "draft":
            text = add(PAD + tokens.tolist(), j, OWN)
            drafts[j] = text
            draft = text if j == sample else draft
            continue
        if j not in live:
            live[j] = len(texts)
            texts.append((list(PAD), j, SELF))
        text = texts[live[j]][0]
        before = len(text)
        text += tokens.tolist()
        ends = range(max(8, before - LIVE_LAG + 1), len(text) - LIVE_LAG + 1)
        own = drafts.get(j, [])  # what it has at the same place is searchable in it
        is_new = [e >= len(own) or own[e - 6 : e] != text[e - 6 : e] for e in ends]
        places += [(live[j], end) for end in itertools.compress(ends, is_new)]
        row = text if j == sample else row

    candidates = []  # (score, length, text, end, source), most trusted first
    if draft is not None:
        at = len(row) if len(row) < len(draft) else None
        for n, distance in OWN_RADIUS:
            reached = (e for e in range(8, len(draft)) if abs(e - len(row)) <= distance)
            if near := [e for e in reached if draft[e - n : e] == row[-n:]]:
                at = min(near, key=lambda e: (abs(e - len(row)), -e))
                break
        if at is not None:
            length = common_suffix(draft[:at], row)
            candidates.append((length + OWN_BONUS, length, draft, at, OWN))
    for n in ORDERS:
        shared = [(text, e) for text, e in places[::-1] if texts[text][0][e - n : e] == row[-n:]]
        if shared:
            other = [place for place in shared if texts[place[0]][1] != texts[shared[0][0]][1]]
            for number, end in shared[:1] + other[:1]:
                text, owner, kind = texts[number]
                length = common_suffix(text[:end], row)
                source = SIBLING if 0 <= owner != sample else kind
                candidates.append((length, length, text, end, source))
            break
    if not candidates:
        return [], 0, OWN
    _, length, text, end, source = max(candidates, key=lambda of: of[0])  # of equals the first
    return text[end : end + limit], length, source


def edited(rng: np.random.Generator, text: np.ndarray, rate: float, alphabet: int) -> np.ndarray:
    """A copy in which each token is replaced, deleted or followed by another at `rate` each."""
    out = []
    for token in text.tolist():
        u = rng.random()
        if u < rate:
            out.append(int(rng.integers(alphabet)))
        elif u < 2 * rate:
            continue
        else:
            out += [token, int(rng.integers(alphabet))] if u < 3 * rate else [token]
    return np.array(out, np.int64)


@pytest.mark.parametrize("alphabet", [2, 4, 12])
def test_proposal_equals_brute_force(alphabet):
    rng = np.random.default_rng(alphabet)
    sources = set()
    for _ in range(60):
        events = random_events(rng, alphabet, count=int(rng.integers(40)))
        history = [
            (rng.integers(alphabet, size=rng.integers(1, 40)), float(rng.integers(2)))
            for _ in range(rng.integers(4))
        ]
        prompt = rng.integers(alphabet, size=rng.integers(40)).tolist()
        index = build(events, history, prompt)
        for sample in range(3):
            limit = int(rng.integers(1, 9))
            tokens, *found = index.propose(sample, limit)
            assert tokens.dtype == np.int32
            wanted = brute_force(events, history, sample, limit, prompt)
            assert (tokens.tolist(), *found) == wanted
            sources.add(found[1])
    assert sources == {OWN, SIBLING, SELF, HISTORY}


def test_continued_match_equals_a_new_search(monkeypatch):
    """In a text without repetitions there is one right place."""
    rng = np.random.default_rng(3)
    draft = rng.permutation(100_000)[:300]
    response = edited(rng, draft, 0.03, 100_000)
    searched, search = [], SuffixIndex._search_group
    noted = lambda self, *asked: searched.append(self) or search(self, *asked)  # noqa: E731
    monkeypatch.setattr(SuffixIndex, "_search_group", noted)
    index = build([("draft", 1, draft)])
    done = compared = carried_on = 0
    while done < len(response):
        searched.clear()
        tokens, length, source = index.propose(0, 16)
        carried_on += not searched
        new = build([("draft", 1, draft), ("extend", 0, response[:done])])
        if length >= 2:
            again = new.propose(0, 16)
            assert (tokens.tolist(), length, source) == (again[0].tolist(), *again[1:])
            compared += 1
        count = min(int(rng.integers(1, 6)), len(response) - done)
        index.extend(0, response[done : done + count])
        done += count
    assert compared > 50 and carried_on > 30


@pytest.mark.parametrize(
    ("response", "lengths"),
    [
        ([10, 11, 12, 99, 14, 15, 16, 17], [8, 0]),  # one token replaced: the draft just goes on
        ([10, 11, 12, 14, 15, 16, 17, 18], [8, 1]),  # one deleted: seen at once
        ([10, 11, 12, 99, 13, 14, 15, 16], [8, 0, 1]),  # one inserted: seen at the next token
        ([10, 11, 12, 16, 17, 18, 19], [8, 0, 2]),  # three deleted: two tokens are needed
    ],
)
def test_resynchronises_with_the_own_draft(response, lengths):
    index = build([("draft", 5, np.arange(10, 20))])
    proposals = []
    done = 0
    while done < len(response):
        tokens, length, source = index.propose(5, 16)
        assert source == OWN
        proposals.append(length)
        accepted = common_suffix(response[done:][::-1], tokens.tolist()[::-1], 99)
        index.extend(5, np.array(response[done : done + accepted + 1]))
        done += accepted + 1
    assert proposals == lengths


def test_failing_draft_yields_to_sibling():
    drafts = [("draft", 0, np.arange(100, 160)), ("draft", 1, np.arange(200, 300))]
    index, sources = build([*drafts, ("extend", 0, ints(100, 201, 202))]), []
    for token in range(203, 210):  # the row goes the sibling's way
        sources.append(index.propose(0, 8)[2])
        assert index.propose(0, 8)[2] == sources[-1]  # asking again is no failure
        index.extend(0, ints(token))
    # Matches of 2, 3, 4, 5 tokens against an advance of 6, 5, 4, 3.
    assert sources == [OWN] * 3 + [SIBLING] * 4


def test_rows_together_equal_rows_one_by_one():
    rng = np.random.default_rng(6)
    together, alone = SuffixIndex(), [GroupIndex() for _ in range(3)]
    rows = [(group, sample) for group in range(3) for sample in range(2)]
    numbers = np.arange(len(rows))
    for number, (group, sample) in enumerate(rows):
        tokens = rng.integers(4, size=50)
        together.add_row(number, group, sample, 400, tokens)
        together.start_indexing(number)
        alone[group].row(sample, tokens)
    lengths = []
    for _ in range(60):
        proposed = np.transpose(together.propose(numbers, np.full(6, 8))).tolist()
        for (begin, count, *found), (group, sample) in zip(proposed, rows, strict=True):
            tokens, length, source = alone[group].propose(sample, 8)
            assert together.text[begin : begin + count].tolist() == tokens.tolist()
            assert found == [length, source]
            lengths.append(length)
        # Of a group one row at a time, as rows of equal recency hide each other.
        for sample in (0, 1):
            counts = rng.integers(1, 4, size=3)
            gained = rng.integers(4, size=int(counts.sum()))
            together.extend(numbers[sample::2], gained, counts)
            together.index_live()
            for group, tokens in enumerate(np.split(gained, np.cumsum(counts)[:-1])):
                alone[group].extend(sample, tokens)
    assert {0, 2, 8} <= set(lengths)
