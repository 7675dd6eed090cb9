"""What rows propose, forward by forward: where proposals come from, how they are counted, and when none are looked for.

The engine is played by `forward`, which accepts what agrees with a given truth. All counts are counted by hand.
"""

import numpy as np
import pytest

from bubblespec.records import Draft, Row, SampleId
from bubblespec.speculate import proposer as speculator_module
from bubblespec.speculate.proposer import RowSpeculator
from bubblespec.speculate.suffix import GroupIndex, History
from bubblespec.speculate.windows import WINDOWS, CostModel

STEP = 5


def cost(a: float = 1.0, b: float = 1e-6, c: float = 1e-6) -> CostModel:
    model = CostModel()
    model.coefficients = np.array([a, b, c, 0.0, 0.0])
    return model


def make(method: str = "bubble+suffix", fixed_window: int | None = 3, costs: CostModel | None = None) -> RowSpeculator:
    speculator = RowSpeculator(method, costs or cost(), fixed_window)
    speculator.begin(STEP)
    return speculator


def row(sample: int = 0, step: int = STEP, uid: int = 70, tokens=()) -> Row:
    return Row(SampleId(uid, step, sample), (1, 2, 3), 500, np.array(tokens, np.int64))


def draft(tokens, version: int = 4) -> Draft:
    return Draft(np.array(tokens, np.int32), True, version)


def forward(speculator, rows: list[Row], truths: list, room: int = 400, budget: int = 4000) -> list[list[int]]:
    """One forward of rows that have followed their truths so far; returns what each proposed. Rows gain what they accept and
    one token more."""
    lengths = np.array([len(r.tokens) for r in rows])
    proposed = speculator.propose(rows, lengths, np.full(len(rows), room), budget)
    proposed = [[] if p is None else p.tolist() for p in proposed]
    gained, accepted = [], []
    for r, truth, tokens in zip(rows, truths, proposed, strict=True):
        rest = list(truth)[len(r.tokens) :]
        right = 0
        while right < min(len(tokens), len(rest) - 1) and tokens[right] == rest[right]:
            right += 1
        accepted.append(right)
        gained.append(np.array(rest[: right + 1], np.int64))
        r.tokens = np.concatenate((r.tokens, gained[-1]))
    speculator.observe(rows, gained, np.array([len(p) for p in proposed]), np.array(accepted))
    return proposed


def test_the_draft_first_and_matches_after_its_first_mismatch():
    """The second of four forwards meets a replaced token; what then comes is found around it in the same draft."""
    speculator = make()
    own = row()
    speculator.track(own, draft(range(10, 40)), STEP)
    truth = [*range(10, 15), 99, *range(16, 40)]
    proposed = [forward(speculator, [own], [truth])[0] for _ in range(4)]
    assert proposed == [[10, 11, 12], [14, 15, 16], [16, 17, 18], [20, 21, 22]]
    assert speculator.stats.by_source == {"aligned": [6, 4], "own": [6, 6]}


def test_bubble_alone_proposes_nothing_after_a_mismatch():
    speculator = make("bubble")
    own = row()
    speculator.track(own, draft(range(10, 40)), STEP)
    truth = [*range(10, 15), 99, *range(16, 40)]
    proposed = [forward(speculator, [own], [truth])[0] for _ in range(8)]
    assert proposed == [[10, 11, 12], [14, 15, 16]] + [[]] * 6
    assert speculator.stats.by_source == {"aligned": [6, 4]}


def test_the_sampled_token_after_a_window_decides_too():
    """All of the window is right, but the token after it is not the draft's: the row has left its draft."""
    speculator = make("bubble")
    own = row()
    speculator.track(own, draft(range(10, 40)), STEP)
    truth = [10, 11, 12, 99, *range(14, 40)]
    assert [forward(speculator, [own], [truth])[0] for _ in range(3)] == [[10, 11, 12], [], []]


def test_a_draft_ends_where_it_ends():
    """Also one that is right: the last window is what is left of it, and then there is nothing, or what matches elsewhere."""
    for method, wanted in (("bubble", []), ("bubble+suffix", [21, 22, 23])):
        speculator = make(method)
        own, sibling = row(0), row(1)
        speculator.track(own, draft(range(10, 16)), STEP)
        speculator.track(sibling, draft(range(10, 40)), STEP)
        proposed = [forward(speculator, [own, sibling], [range(10, 40)] * 2)[0] for _ in range(4)]
        assert proposed[:2] == [[10, 11, 12], [14, 15]]
        assert proposed[3] == (wanted and proposed[3]) and bool(proposed[2]) == bool(wanted)
    assert speculator.stats.by_source["sibling"][1] > 0


def test_suffix_alone_uses_no_draft_but_other_samples_and_epochs():
    speculator = make("suffix")
    speculator.history = History(1000)
    speculator.history.add(70, np.arange(50, 70), 1.0, 0)
    own, other = row(0), row(1, uid=71)
    for r in (own, other):
        speculator.track(r, draft(range(10, 40)), STEP)
    assert forward(speculator, [own, other], [range(50, 70)] * 2) == [[50, 51, 52], []]
    late = row(2)
    speculator.track(late, None, STEP)
    assert forward(speculator, [own, late], [range(50, 70), range(50, 70)])[0] == [54, 55, 56]
    assert set(speculator.stats.by_source) == {"history", "sibling"} or set(speculator.stats.by_source) == {"history"}
    assert not speculator.stats.by_age


def test_a_row_with_tokens_does_not_follow_a_draft_from_the_start():
    speculator = make("bubble")
    own = row(tokens=[10, 11])
    speculator.track(own, draft(range(10, 40)), STEP)
    assert forward(speculator, [own], [range(10, 40)]) == [[]]


def test_unknown_rows_and_rows_without_room_get_nothing():
    speculator = make()
    known, unknown = row(0), row(1)
    speculator.track(known, draft(range(10, 40)), STEP)
    assert forward(speculator, [known, unknown], [range(10, 40)] * 2, room=0) == [[], []]
    assert speculator.stats.num_row_forwards == 1 and speculator.stats.num_gained == 1
    assert forward(speculator, [known, unknown], [range(10, 40)] * 2, room=2) == [[11, 12], []]


@pytest.mark.parametrize("window", [0, 1, 7, 200])
def test_a_fixed_window_is_always_full(window):
    """Whatever it costs, as long as draft and room go so far."""
    speculator = make(fixed_window=window, costs=cost(1e-6, 1.0, 1.0))
    own = row()
    speculator.track(own, draft(range(1000)), STEP)
    for _ in range(3):
        done = len(own.tokens)
        assert forward(speculator, [own], [range(1000)], budget=5) == [list(range(done, done + window))]
        assert len(own.tokens) == done + window + 1


def test_planned_windows_grow_with_what_a_forward_costs_and_keep_to_the_budget():
    lengths = []
    for costs, budget in ((cost(), 4000), (cost(), 9), (cost(1e-6, 0.0, 1.0), 4000)):
        speculator = make(fixed_window=None, costs=costs)
        own = row()
        speculator.track(own, draft(range(1000)), STEP)
        lengths.append(len(forward(speculator, [own], [range(1000)], budget=budget)[0]))
    assert lengths == [128, 9, 0]


def test_counts_of_a_rollout():
    """One row with an old draft that goes wrong, one without a draft, and a run-ahead row, which is not counted."""
    speculator = make("bubble")
    old, bare, ahead = row(0), row(1), row(0, step=STEP + 1)
    speculator.track(old, draft(range(10, 18), version=2), STEP)
    speculator.track(bare, None, STEP)
    speculator.track(ahead, draft(range(10, 40), version=1), STEP)
    truths = [[10, 11, 12, 13, 50, 51, 52], range(80, 90), range(10, 40)]
    proposed = [forward(speculator, [old, bare, ahead], truths) for _ in range(3)]
    assert [p[0] for p in proposed] == [[10, 11, 12], [14, 15, 16], []]
    assert [p[2] for p in proposed] == [[10, 11, 12], [14, 15, 16], [18, 19, 20]]
    stats = speculator.stats
    assert (stats.num_row_forwards, stats.num_gained) == (6, (4 + 1 + 1) + 3)
    assert (stats.num_draft, stats.num_accepted, stats.num_covered) == (6, 3, 3 + 1)
    assert stats.by_source == {"aligned": [6, 3]} and stats.by_age == {3: [6, 3]}
    assert stats.aligned == [4, 3] and stats.left == [1, 0]
    assert {int(WINDOWS[i]): int(n) for i, n in enumerate(stats.accepted_lengths) if n} == {0: 1, 3: 1}
    assert stats.seconds > 0
    # The chances of drafts are learnt from run-ahead rows too: 9 of 9 tokens right at age 4, 3 of 4 trials at age 3.
    estimate = speculator.survival.estimate
    assert estimate(("aligned", 4), 0.5) == pytest.approx((9 + 4) / (9 + 8), abs=0.02)
    assert estimate(("aligned", 3), 0.5) == pytest.approx((3 + 4) / (4 + 8), abs=0.02)
    speculator.begin(STEP + 1)
    assert speculator.stats.num_row_forwards == 0 and not speculator.stats.by_age
    assert forward(speculator, [ahead], [range(10, 40)]) == [[]], "a new rollout has forgotten the rows"


@pytest.mark.parametrize("accepted, lowest", [(0, 0), (1, 1), (5, 4), (6, 6), (7, 6), (127, 96), (128, 128), (150, 128)])
def test_accepted_lengths_are_binned_by_windows(accepted, lowest):
    """A verification with 5 accepted tokens belongs to the bin of 4 and up."""
    speculator = make(fixed_window=150)
    own = row()
    speculator.track(own, draft(range(1000)), STEP)
    forward(speculator, [own], [[*range(accepted), -5, -6]])
    assert speculator.stats.num_accepted == accepted
    assert speculator.stats.accepted_lengths.tolist() == [int(w == lowest) for w in WINDOWS]
    assert speculator.stats.num_covered == min(accepted + 1, 150)


def count_looks(speculator) -> list:
    """A list that grows by one entry for each candidate looked for."""
    looks, candidate = [], speculator._candidate
    speculator._candidate = lambda *arguments: looks.append(1) or candidate(*arguments)
    return looks


def test_a_pause_follows_proposals_that_do_not_pay_and_ends():
    """Looked for in the first forward, then after 1, 3, 7, 15 and at most 16 without; at once again as soon as they pay."""
    dear, cheap = cost(1e-9, 0.0, 1.0), cost()  # a token costs what it brings at best
    speculator = make("bubble", fixed_window=None, costs=dear)
    own = row()
    speculator.track(own, draft(range(1000)), STEP)
    looks, looked = count_looks(speculator), []
    for number in range(70):
        before = len(looks)
        assert forward(speculator, [own], [range(1000)]) == [[]]
        if len(looks) > before:
            looked.append(number)
    assert looked == [0, 2, 6, 14, 30, 47, 64]
    speculator.cost = cheap
    silent = 0
    while not forward(speculator, [own], [range(1000)])[0]:
        silent += 1
    assert silent == 11, "what is left of 16 forwards"
    assert all(forward(speculator, [own], [range(1000)])[0] for _ in range(3))
    speculator.cost = dear
    before = len(looks)
    assert [len(forward(speculator, [own], [range(1000)])[0]) for _ in range(3)] == [0, 0, 0]
    assert len(looks) == before + 2, "the pauses begin anew with the shortest"


def test_a_new_rollout_begins_without_a_pause():
    """The last rows of a rollout have left their drafts behind; the next one's rows have new ones, from their first token on."""
    speculator = make("bubble", fixed_window=None)
    own = row()
    speculator.track(own, None, STEP)
    for _ in range(40):
        forward(speculator, [own], [range(1000)])
    speculator.begin(STEP + 1)
    own = row(step=STEP + 1)
    speculator.track(own, draft(range(1000)), STEP + 1)
    assert len(forward(speculator, [own], [range(1000)])[0]) > 3


def test_tokens_of_a_continued_row_are_indexed_once_and_in_order(monkeypatch):
    """Those it came with, and those it has gained before anybody asked and since; a draft of a late sibling comes in too."""
    texts, drafts = {}, []

    class Recorder(GroupIndex):
        def extend(self, sample, tokens):
            texts.setdefault(sample, []).extend(tokens.tolist())
            super().extend(sample, tokens)

        def add_draft(self, sample, tokens):
            drafts.append(sample)
            super().add_draft(sample, tokens)

    monkeypatch.setattr(speculator_module, "GroupIndex", Recorder)
    speculator = make("bubble+suffix", fixed_window=2)
    own, continued = row(0), row(1, tokens=[8, 9, 10])
    speculator.track(own, draft(range(10, 14)), STEP)
    speculator.track(continued, None, STEP)
    speculator.observe([continued], [np.array([11])], np.array([0]), np.array([0]))
    continued.tokens = np.array([8, 9, 10, 11])
    assert not texts, "a group is made when it is first needed"
    truths = [range(10, 30), range(8, 30)]
    assert forward(speculator, [own, continued], truths) == [[10, 11], [12, 13]]
    late = row(2)
    speculator.track(late, draft(range(60, 64)), STEP)
    for _ in range(2):
        forward(speculator, [own, continued, late], [*truths, range(60, 90)])
    speculator._group(own)
    assert texts == {r.id.sample: r.tokens.tolist() for r in (own, continued, late)} and len(texts[1]) > 5
    assert drafts == [0, 2]
