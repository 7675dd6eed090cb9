"""How samples are put into micro-batches."""

import numpy as np
import pytest
import torch

from bubblespec.engine.packing import pack_sequences
from bubblespec.learn.microbatch import _first_fit


def first_fit_by_search(indices, lengths, max_tokens):
    microbatches, room = [], []
    for index in indices:
        fits = next((i for i, r in enumerate(room) if r >= lengths[index]), None)
        if fits is None:
            fits = len(room)
            microbatches.append([])
            room.append(max_tokens)
        microbatches[fits].append(index)
        room[fits] -= lengths[index]
    return microbatches


@pytest.mark.parametrize("count", [0, 1, 7, 201])
def test_first_fit_takes_the_first_microbatch_with_room(count):
    rng = np.random.default_rng(count)
    for max_tokens in (60, 100, 1000):
        lengths = rng.integers(1, 120, count)  # some longer than a micro-batch may be
        indices = rng.permutation(count).tolist()
        wanted = first_fit_by_search(indices, lengths, max_tokens)
        assert _first_fit(indices, lengths, max_tokens) == wanted


def test_sequences_are_attended_with_others_more_than_half_as_long():
    """Padding at most doubles a group's work. Each group's index gives its sequences' own tokens,
    longest first, the last token of each as its padding; the order puts all of them back."""
    lengths = [1, 7, 40, 20, 21, 3, 2, 40, 9]
    tokens = torch.arange(sum(lengths))
    groups, order = pack_sequences(lengths, torch.device("cpu")).groups
    whole = sorted(tokens.split(lengths), key=len, reverse=True)
    members, unpadded = [], []
    for count, longest, index, real in groups:
        padded = tokens[index].reshape(count, longest)
        for row, sequence in zip(padded, whole[len(members) :], strict=False):
            assert longest < 2 * len(sequence)
            assert row.tolist() == sequence.tolist() + [int(sequence[-1])] * (
                longest - len(sequence)
            )
            members.append(sequence)
        unpadded.append(tokens[index][real])
    assert [len(sequence) for sequence in members] == sorted(lengths, reverse=True)
    assert [int(longest) for _, longest, _, _ in groups] == [40, 20, 9, 3, 1]
    assert torch.equal(torch.cat(unpadded)[order], tokens)
