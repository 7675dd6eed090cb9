"""The draft store: its limit, its exchange between ranks, and its saved state."""

import numpy as np

from bubblespec.draft.store import TextStore, exchange
from bubblespec.types import Draft, SampleId

BIG = (1 << 63) - 1


def draft(*tokens: int, finished: bool = False, version: int = 0) -> Draft:
    return Draft(np.array(tokens, np.int32), finished, version)


def contents(store: TextStore, ids) -> dict:
    found = {sample: store.get(sample) for sample in ids}
    return {
        sample: (d.tokens.tolist(), d.is_finished, d.version)
        for sample, d in found.items()
        if d is not None
    }


def sample(number: int) -> SampleId:
    return SampleId(5, 1, number)


def test_limit_counts_growth_only():
    store = TextStore(max_tokens=6)
    assert store.put(sample(0), draft(1, 2, 3))
    assert not store.put(sample(1), draft(1, 2, 3, 4))
    assert store.put(sample(0), draft(1, 2, 3, 4, 5, 6)) and store.num_tokens == 6
    store.drop([sample(1), SampleId(1, 5, 0)])
    assert len(store) == 1 and store.num_tokens == 6 and store.get(sample(1)) is None
    store.drop([sample(0), sample(1)])
    assert len(store) == 0 and store.num_tokens == 0


def test_deferred_samples_displace_latest_coming_drafts():
    store = TextStore(max_tokens=9)
    for number in range(3):
        store.put(sample(number), draft(1, 2, 3))
    assert store.put(sample(7), draft(1, 2), is_deferred=True)
    assert {*contents(store, map(sample, range(9)))} == {sample(0), sample(1), sample(7)}
    assert store.put(sample(7), draft(1, 2, 3, 4)), "still deferred as it grows"
    assert {*contents(store, map(sample, range(9)))} == {sample(0), sample(7)}
    for number in range(4, 7):
        assert store.put(sample(number), draft(*range(6)), is_deferred=True)
    assert {*contents(store, map(sample, range(9)))} == {sample(n) for n in (4, 5, 6, 7)}
    assert store.num_tokens == 22 and not store.put(sample(0), draft(1))

    resumed = TextStore(max_tokens=1)  # a smaller machine
    resumed.load_state_dict(store.state_dict())
    assert {*contents(resumed, map(sample, range(9)))} == {sample(n) for n in (4, 5, 6, 7)}
    store.drop(map(sample, range(9)))
    assert store.put(sample(7), draft(*range(9))) and not store.put(sample(6), draft(1))


def test_exchange_gives_all_ranks_the_same_store():
    other = SampleId(BIG, 2, 3)
    own = [
        {sample(0): draft(7, 8, version=1), sample(2): draft(finished=True)},
        {other: draft(9, finished=True, version=2)},
        {},
    ]
    sent = [[] for _ in own]

    class Ranks:
        def __init__(self, rank):
            self.rank, self.turn = rank, 0

        def gather_ragged(self, array):
            if self.rank is not None:
                sent[self.rank].append(array)
                return [array]
            self.turn += 1
            return [arrays[self.turn - 1] for arrays in sent]

    for rank in range(3):
        exchange(TextStore(100), own[rank], Ranks(rank), are_deferred=rank == 1)
    for limit, kept in ((100, [sample(0), sample(2), other]), (2, [sample(2), other])):
        store = TextStore(limit)
        exchange(store, own[0], Ranks(None))
        expected = {name: d for drafts in own for name, d in drafts.items() if name in kept}
        assert contents(store, [sample(0), sample(2), other]) == {
            name: (d.tokens.tolist(), d.is_finished, d.version) for name, d in expected.items()
        }


def test_state_round_trip():
    store, ids = TextStore(100), [SampleId(BIG, 1, 0), sample(7), SampleId(2, 4, 7)]
    for number, name in enumerate(ids):
        store.put(name, draft(*range(number), finished=number == 1, version=number))
    again = TextStore(100)
    again.load_state_dict(store.state_dict())
    assert contents(again, ids) == contents(store, ids) and again.num_tokens == 3
    again.load_state_dict(TextStore(5).state_dict())
    assert len(again) == 0


def test_latest_texts_displace_the_oldest():
    history = TextStore(max_tokens=10, keeps_latest=True)
    names = [SampleId(prompt_id, draw_index, 0) for draw_index in range(4) for prompt_id in (1, 2)]
    for number, (name, size) in enumerate(zip(names, (4, 3, 3, 1, 11, 2), strict=False)):
        text = Draft(np.full(size, number, np.int32), True, reward=number / 2)
        assert history.put(name, text) == (size < 11), "it would empty the store and still not fit"
    kept = {
        prompt_id: [int(text.tokens[0]) for text in history.of_prompt(prompt_id)]
        for prompt_id in (0, 1, 2)
    }
    assert kept == {0: [], 1: [2], 2: [1, 3, 5]} and history.num_tokens == 9
    state, same, smaller = history.state_dict(), *(TextStore(size, True) for size in (10, 5))
    same.put(names[7], draft(1))  # replaced by the state
    for store in (same, smaller):
        store.load_state_dict(state)
    for key, value in same.state_dict().items():
        np.testing.assert_array_equal(value, state[key])
        assert value.dtype == state[key].dtype
    assert [text.reward for text in same.of_prompt(2)] == [0.5, 1.5, 2.5]
    assert [text.reward for text in smaller.of_prompt(2)] == [1.5, 2.5] and len(smaller) == 2
    same.drop(names)
    assert not same.of_prompt(1) and same.num_tokens == 0


def test_history_saved_without_ids_is_read():
    state = {"uid": np.array([1, 2, 1]), "length": np.array([2, 1, 1])}
    state |= {"reward": np.array([0.5, 1.0, 2.0]), "tokens": np.arange(4, dtype=np.int32)}
    history = TextStore(100, keeps_latest=True)
    history.load_state_dict(state)
    found = [(text.tokens.tolist(), text.reward) for text in history.of_prompt(1)]
    assert found == [([0, 1], 0.5), ([3], 2.0)]
