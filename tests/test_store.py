"""The draft store: its bound, its exchange between ranks, and its round trip."""

import numpy as np
import torch

from bubblespec.dist.ranks import Ranks
from bubblespec.draft.store import DraftStore, exchange
from bubblespec.types import Draft, SampleId


def draft(*tokens: int, finished: bool = False, version: int = 0) -> Draft:
    return Draft(np.array(tokens, np.int32), finished, version)


def contents(store: DraftStore, keys) -> dict:
    found = {key: store.get(key) for key in keys}
    return {
        k: (d.tokens.tolist(), d.is_finished, d.version) for k, d in found.items() if d is not None
    }


BIG = (1 << 63) - 1


def test_bound_counts_growth_only():
    store = DraftStore(max_tokens=6)
    first, second = SampleId(5, 1, 0), SampleId(5, 1, 1)
    assert store.put(first, draft(1, 2, 3))
    assert not store.put(second, draft(1, 2, 3, 4))
    assert store.put(first, draft(1, 2, 3, 4, 5, 6)) and store.num_tokens == 6
    assert store.get(second) is None
    store.drop([second, SampleId(5, 0, 0), SampleId(1, 5, 0)])
    assert len(store) == 1 and store.num_tokens == 6
    store.drop([first, second])
    assert len(store) == 0 and store.num_tokens == 0


def test_exchange_gives_all_ranks_the_same_store():
    """Two ranks, whose collectives are played by hand."""
    first = {SampleId(BIG, 2, 3): draft(7, 8, version=1), SampleId(1, 2, 0): draft(finished=True)}
    own = [first, {SampleId(4, 3, 0): draft(9, finished=True, version=2)}]
    sent = [[], []]

    class Recorder:
        def __init__(self, rank):
            self.rank, self.turn = rank, 0

        def gather_ragged(self, array):
            sent[self.rank].append(array)
            return [array]

    for rank in (0, 1):
        exchange(DraftStore(100), own[rank], Recorder(rank))

    class Both:
        turn = -1

        def gather_ragged(self, array):
            self.turn += 1
            return [sent[0][self.turn], sent[1][self.turn]]

    store = DraftStore(100)
    assert exchange(store, own[0], Both()) == 3
    keys = [*own[0], *own[1]]
    assert contents(store, keys) == {
        SampleId(BIG, 2, 3): ([7, 8], False, 1),
        SampleId(1, 2, 0): ([], True, 0),
        SampleId(4, 3, 0): ([9], True, 2),
    }


def test_nothing_to_exchange():
    store = DraftStore(10)
    assert exchange(store, {}, Ranks(torch.device("cpu"))) == 0 and len(store) == 0


def test_state_round_trip():
    store, keys = DraftStore(100), [SampleId(BIG, 1, 0), SampleId(2, 1, 7), SampleId(2, 4, 7)]
    for number, key in enumerate(keys):
        store.put(key, draft(*range(number), finished=number == 1, version=number))
    again = DraftStore(100)
    again.load_state_dict(store.state_dict())
    assert contents(again, keys) == contents(store, keys) and again.num_tokens == 3
    again.load_state_dict(DraftStore(5).state_dict())
    assert len(again) == 0
