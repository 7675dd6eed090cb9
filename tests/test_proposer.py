"""Proposals of rows, forward by forward: their sources and counts, which are made by hand."""

import numpy as np
import pytest

from bubblespec.draft import proposer as module
from bubblespec.draft.proposer import Proposer
from bubblespec.draft.sources import TextMatches, TrackedRows
from bubblespec.draft.store import TextStore
from bubblespec.draft.suffix import SuffixIndex
from bubblespec.engine.arrays import packed
from bubblespec.planner.costs import CostModel
from bubblespec.planner.windows import WINDOWS
from bubblespec.types import Draft, SampleId
from tests.helpers.clocks import Clock
from tests.helpers.proposals import (
    STEP,
    Guesses,
    cost,
    draft,
    drafts_and,
    forward,
    make,
    row,
    with_guess,
)
from tests.helpers.rollouts import tried_ages
from tests.helpers.suffix import texts_of


def estimate(proposer: Proposer, kind: tuple) -> float:
    survival = proposer.survival
    return float(survival.estimates[survival.kinds.index(kind)])


def test_outcomes_count_for_the_proposal_in_flight():
    """The next one, a match this time, is made before the first one's outcome is known."""
    proposer, own = make(), row()
    own.draft = draft(range(10, 40))
    proposer.track(own, STEP)
    given = [own], np.array([0]), np.array([4]), 99
    first = proposer.propose(*given)
    second = proposer.propose(*given, in_flight=first[1] + 1)
    assert first[1] == [4] and second[1] == [9]
    for accepted in (1, 0):  # what follows a wrong token is not the draft any more
        tokens = np.array([10, 99] if accepted else [55])
        counts = np.array([len(tokens)]), np.array([4]), np.array([accepted])
        proposer.observe([own], tokens, *counts)
    assert proposer.acceptance.by_source == {"aligned": [8, 1]}
    proposer.propose([own], np.array([3]), np.array([4]), 99)
    proposer.observe([own], np.array([7]), *np.array([[1], [4], [0]]))
    assert proposer.acceptance.by_source == {"aligned": [8, 1], "own": [4, 0]}


def test_outcome_in_flight_counts_for_its_own_source():
    proposer, one, guesses = with_guess([*range(10, 14), 99], range(10, 40))
    given = [one], np.array([0]), np.array([4]), 99
    first = proposer.propose(*given)
    guesses.chance = 0.0
    proposer.propose(*given, in_flight=first[1] + 1)
    for accepted in (4, 1):
        gained = np.array([10, 11, 12, 13, 14] if accepted == 4 else [15, 99])
        proposer.observe([one], gained, *np.array([[accepted + 1], [4], [accepted]]))
    assert proposer.acceptance.by_source == {"guess": [4, 4], "aligned": [4, 1]}


def test_matches_follow_the_draft_behind_a_mismatch():
    """The second of four forwards meets a replaced token."""
    proposer, own = make(), row()
    own.draft = draft(range(10, 40))
    proposer.track(own, STEP)
    truth = [*range(10, 15), 99, *range(16, 40)]
    proposed = [forward(proposer, [own], [truth])[0] for _ in range(4)]
    assert proposed == [[10, 11, 12], [14, 15, 16], [16, 17, 18], [20, 21, 22]]
    assert proposer.acceptance.by_source == {"aligned": [6, 4], "own": [6, 6]}


@pytest.mark.parametrize(
    "tokens, truth, wanted",
    [
        # All of the window is right, but the token after it is not the draft's.
        ([], [10, 11, 12, 99, *range(14, 40)], [[10, 11, 12], []]),
        # A row that comes with tokens goes on in its draft if they are its beginning.
        ([10, 11], range(10, 40), [[12, 13, 14], [16, 17, 18]]),
        ([10, 12], range(10, 40), [[], []]),
    ],
)
def test_draft_is_followed_up_to_a_mismatch(tokens, truth, wanted):
    proposer, own = make("bubble"), row(tokens=tokens)
    own.draft = draft(range(10, 40))
    proposer.track(own, STEP)
    assert [forward(proposer, [own], [truth])[0] for _ in range(2)] == wanted


def test_suffix_alone_finds_other_samples_and_epochs():
    history = TextStore(1000)
    history.put(SampleId(70, 1, 0), Draft(np.arange(50, 70, dtype=np.int32), True))
    proposer = make("suffix", history=history)
    own, other = row(0), row(1, prompt_id=71)
    for r in (own, other):
        proposer.track(r, STEP)
    assert forward(proposer, [own, other], [range(50, 70)] * 2) == [[50, 51, 52], []]
    late = row(2)
    proposer.track(late, STEP)
    assert forward(proposer, [own, late], [range(50, 70)] * 2)[0] == [54, 55, 56]
    assert set(proposer.acceptance.by_source) <= {"history", "sibling"}
    assert not tried_ages(proposer)


def test_rollout_counts_equal_hand_counts():
    proposer = make("bubble")
    old, bare, ahead = row(0), row(1), row(0, draw_index=STEP + 1, number=2)
    old.draft = draft(range(10, 18), version=2)
    proposer.track(old, STEP)
    proposer.track(bare, STEP)
    ahead.draft = draft(range(10, 40), version=1)
    proposer.track(ahead, STEP, is_counted=False)
    truths = [[10, 11, 12, 13, 50, 51, 52], range(80, 90), range(10, 40)]
    proposed = [forward(proposer, [old, bare, ahead], truths) for _ in range(3)]
    assert [p[0] for p in proposed] == [[10, 11, 12], [14, 15, 16], []]
    assert [p[2] for p in proposed] == [[10, 11, 12], [14, 15, 16], [18, 19, 20]]
    counts = proposer.acceptance
    assert (counts.row_forwards, counts.gained_tokens) == (6, (4 + 1 + 1) + 3)
    assert (counts.draft_tokens, counts.accepted_tokens, counts.covered_tokens) == (6, 3, 3 + 1)
    assert counts.by_source == {"aligned": [6, 3]} and tried_ages(proposer) == {3, 4}
    assert proposer.survival.behind.tolist() == [1, 0]
    lengths = {int(WINDOWS[i]): int(n) for i, n in enumerate(counts.accepted_lengths) if n}
    assert lengths == {0: 1, 3: 1}
    spent_s, looked_up = proposer.take_spent()
    assert spent_s > 0 and looked_up == 9 and proposer.take_spent() == (0.0, 0)
    # Learned from rows drafted ahead too: 9 of 9 tokens right at age 4, 3 of 4 at age 3.
    prior = 8 * module.PRIORS["aligned"]
    assert estimate(proposer, ("aligned", 4)) == pytest.approx((9 + prior) / (9 + 8), abs=0.02)
    assert estimate(proposer, ("aligned", 3)) == pytest.approx((3 + prior) / (4 + 8), abs=0.02)
    proposer.begin()
    assert proposer.acceptance.row_forwards == 0 and not tried_ages(proposer)


def test_continued_row_is_indexed_once_and_in_order(monkeypatch):
    """Its first tokens, and the ones gained before and after a query; a late sibling's draft."""
    indexed, start = [], SuffixIndex.start_indexing
    noted = lambda self, row: indexed.append(row) or start(self, row)  # noqa: E731
    monkeypatch.setattr(SuffixIndex, "start_indexing", noted)
    proposer = make("bubble+suffix")
    own, continued = row(0), row(1, tokens=[8, 9, 10])
    own.draft = draft(range(10, 14))
    proposer.track(own, STEP)
    proposer.track(continued, STEP)
    proposer.observe([continued], np.array([11]), np.array([1]), *np.zeros((2, 1), np.int64))
    continued.tokens = np.array([8, 9, 10, 11])
    assert not indexed, "a group is indexed when it is first needed"
    truths = [range(10, 30), range(8, 30)]
    assert forward(proposer, [own, continued], truths, room=2) == [[10, 11], [12, 13]]
    late = row(2)
    late.draft = draft(range(60, 64))
    proposer.track(late, STEP)
    for _ in range(2):
        forward(proposer, [own, continued, late], [*truths, range(60, 90)], room=2)
    assert proposer.acceptance.row_forwards == 9 and indexed == [0, 1, 2]
    wanted = [each.tokens.tolist() for each in (own, continued, late)]
    assert texts_of(proposer.tracked.texts, [0, 1, 2]) == wanted and len(wanted[1]) > 5


def test_row_is_aligned_while_the_draft_begins_with_tokens():
    """Random rows gain tokens together, most of them as in the drafts."""
    rng, tracked, texts, drafts = np.random.default_rng(0), TrackedRows(), [], []
    for number in range(40):
        drafts.append(rng.integers(3, size=rng.integers(0, 60)).tolist())
        texts.append((drafts[-1] + [1] * 9)[: rng.integers(0, 9)])
        of_sample = draft(drafts[-1]) if rng.random() < 0.8 else None
        drafts[-1] = [] if of_sample is None else drafts[-1]
        one = row(number, tokens=texts[-1])
        one.draft = of_sample
        tracked.add(one, 0, True)
    aligned = set()
    for _ in range(12):
        some, counts = rng.permutation(40)[:25], rng.integers(1, 9, 25)
        said = [drafts[number][len(texts[number]) :] + [0] * 9 for number in some]
        gained = [np.array(of[:count]) for of, count in zip(said, counts, strict=True)]
        for number, tokens in zip(some, gained, strict=True):
            tokens[-1] += rng.random() < 0.1
            texts[number] += tokens.tolist()
        tracked.texts.extend(some, *packed(gained))
        wanted = [bool(d) and d[: len(t)] == t for d, t in zip(drafts, texts, strict=True)]
        assert tracked.texts.is_aligned[:40].tolist() == wanted
        assert texts_of(tracked.texts, np.arange(40)) == texts
        aligned.add(sum(wanted))
    assert max(aligned) > 15 > min(aligned)


def test_source_is_queried_for_unserved_rows_alone():
    drafted, guessed, bare = row(0), row(1), row(2)
    guesses = Guesses({drafted.id: list(range(70, 99)), guessed.id: [20, 21, 99, *range(23, 40)]})
    proposer = drafts_and(guesses)
    for each in (drafted, guessed, bare):
        each.draft = draft(range(10, 40)) if each is drafted else None
        proposer.track(each, STEP)
    truths = [[*range(10, 15), 99, 76, 77, 78, 79, 80], range(20, 40), range(50, 70)]
    proposed = [forward(proposer, [drafted, guessed, bare], truths) for _ in range(3)]
    assert [p[0] for p in proposed] == [[10, 11, 12], [14, 15, 16], [76, 77, 78]]
    assert [p[1] for p in proposed] == [[20, 21, 99], [23, 24, 25], [27, 28, 29]]
    assert [p[2] for p in proposed] == [[], [], []]
    assert guesses.asked == [[guessed.id, bare.id]] * 2 + [[drafted.id, guessed.id, bare.id]]
    gained = {each.id: each.tokens.tolist() for each in (drafted, guessed, bare)}
    assert guesses.begins == 1 and guesses.gained == gained
    counts = proposer.acceptance
    assert counts.by_source == {"aligned": [6, 4], "guess": [12, 2 + 3 + 3 + 3]}
    assert tried_ages(proposer) == {1}
    assert counts.draft_tokens == 18 and counts.accepted_tokens == 15
    prior = 8 * module.PRIOR
    assert estimate(proposer, ("guess",)) == pytest.approx((11 + prior) / (12 + 8), abs=0.02)
    assert forward(proposer, [guessed], [range(20, 40)], room=0) == [[]]
    assert len(guesses.asked) == 3, "no room, no question"


@pytest.mark.parametrize("guess", [[7, 7, 7], [10, 11, 7]])
def test_wrong_guess_of_another_source_keeps_alignment(guess):
    """A source takes a row's own draft's place for one forward, and is refused."""
    proposer, one, guesses = with_guess(guess, range(10, 40))
    assert forward(proposer, [one], [range(10, 40)]) == [guess]
    guesses.chance = 0.0
    begin = 10 + len(one.tokens)
    assert forward(proposer, [one], [range(10, 40)]) == [[begin, begin + 1, begin + 2]]


def test_disabled_source_gets_no_query_and_no_tokens():
    proposer, one, guesses = with_guess([1, 2, 9, 7, 7, 7], [1, 2, 3])
    guesses.is_enabled = False
    assert proposer.enabled_sources == [proposer.sources[0]]
    assert forward(proposer, [one], [[1, 2, 9, 7, 7, 7]]) == [[1, 2, 3]]
    assert guesses.asked == [] and guesses.gained == {one.id: []}
    guesses.is_enabled, guesses.gained = True, {one.id: one.tokens.tolist()}
    assert forward(proposer, [one], [[1, 2, 9, 7, 7, 7]]) == [[7, 7, 7]]


@pytest.mark.parametrize(
    "always, costs, budget, wanted",
    [
        (False, cost(), 4000, 128),
        (False, cost(), 9, 8),
        (False, cost(1e-6, 0.0, 1.0), 4000, 0),
        (True, cost(1e-6, 1.0, 1.0), 5, module.ALWAYS_WINDOW),
    ],
)
def test_windows_follow_costs_and_budget_unless_fixed(always, costs, budget, wanted):
    proposer, own = make(always=always, costs=costs), row()
    own.draft = draft(range(1000))
    proposer.track(own, STEP)
    for _ in range(2 if always else 1):
        begin = len(own.tokens)
        proposed = forward(proposer, [own], [range(1000)], room=400, budget=budget)
        assert proposed == [list(range(begin, begin + wanted))]


def test_given_up_source_is_tried_again():
    """Guesses are wrong for many rows in the first rollout, and right from the second on."""
    rows, guesses = [row(number) for number in range(100)], Guesses({})
    proposer = Proposer([guesses], cost(), clock=Clock())
    accepted = []
    for rollout in range(9):
        proposer.begin()
        for each in rows:
            each.tokens = each.tokens[:0]
            proposer.track(each, STEP)
            guesses.guesses[each.id] = list(range(50, 550)) if rollout else [7] * 500
        for _ in range(8):
            forward(proposer, rows, [range(50, 600)] * len(rows))
        drafted, right = proposer.acceptance.by_source.get("guess", (0, 0))
        assert drafted or rollout, "it is tried before anything is known"
        accepted.append(right)
    assert accepted[:2] == [0, 0] and all(accepted[7:]), "given up, and tried again"
    unused = Proposer([guesses], cost(), clock=Clock())
    unused.survival.load_state_dict(proposer.survival.state_dict())
    unused.begin()
    assert unused.acceptance.by_source == {"guess": [0, 0]}, "in the metrics all the same"


def test_sources_that_need_results_are_not_asked_while_tokens_are_in_flight():
    class Waiting(TextMatches):
        needs_results = True

    proposer = Proposer([Waiting(TextStore(0))], CostModel(), always=True)
    proposer.begin()
    own, one = row(), np.array([1])
    own.draft = draft(range(9))
    proposer.track(own, STEP)
    given = [own], 0 * one, 15 * one, 64
    assert proposer.needs_results and proposer.propose(*given, in_flight=0 * one)[1] == 6
    assert proposer.propose(*given, in_flight=one)[1] == 0
