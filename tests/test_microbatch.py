"""How the sequences of a micro-batch are attended together."""

import torch

from bubblespec.engine.model import pack_sequences


def test_padding_at_most_doubles_attended_sequences():
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
