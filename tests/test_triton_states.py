"""Kernels of layers with a state against torch_states.py, token by token and over random forwards:
on a GPU, or in triton's interpreter, which shows neither races nor missing barriers."""

import os
from functools import partial

import numpy as np
import pytest
import torch

from bubblespec.engine.ops import torch_states
from bubblespec.engine.ops.view import AttentionMetadata

triton = pytest.importorskip("triton")
from bubblespec.engine.ops import triton_states  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    DEVICE = "cpu"
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero) encountered")
else:
    DEVICE = "cuda"
    has_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    pytestmark = [pytest.mark.gpu, has_gpu]

SLOTS, WINDOW, TAPS, SPARE = 3, 4, 4, 1000
KEY, VALUE, LENGTH = 5, 6, 40


def int32(values) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(DEVICE)


class Rows:
    """Rows of random numbers, fed as an engine feeds them: (slot, first position, tokens, fed)."""

    def __init__(self, heads: int, key_heads: int, has_beta: bool, seed: int):
        torch.manual_seed(seed)
        self.channels = 2 * key_heads * KEY + heads * VALUE
        self.heads, self.key_heads, self.has_beta = heads, key_heads, has_beta
        self.weight, self.bias = torch.randn(self.channels, TAPS), torch.randn(self.channels)
        self.texts = torch.randn(SLOTS, LENGTH, self.channels)
        self.decay = -2 * torch.rand(SLOTS, LENGTH, heads)
        self.beta = 2 * torch.rand(SLOTS, LENGTH, heads)
        # Whatever earlier rows have left.
        zeros = lambda *shape: torch.full((SLOTS, *shape), 7.0, device=DEVICE)  # noqa: E731
        self.inputs = zeros(WINDOW + TAPS - 1, self.channels)
        self.waiting = triton_states.Waiting(
            zeros(heads, KEY, VALUE),
            zeros(2, key_heads, WINDOW, KEY),
            zeros(heads, WINDOW, VALUE),
            zeros(2, heads, WINDOW),
        )
        self.standing = int32(np.zeros((SLOTS, 2)))

    def view(self, fed: list[tuple[int, int, int, int]], max_q: int) -> AttentionMetadata:
        slots, first, place, position = [], [0], [], []
        for slot, start, count, num_fed in fed:
            for begin in range(0, count, max_q):
                slots.append(slot)
                first.append(first[-1] + min(max_q, count - begin))
            is_fed = np.arange(count) < num_fed
            position.append(np.where(is_fed, start + np.arange(count), 0))
            place.append(np.where(is_fed, 0, SPARE))
        slots, first = [*slots, 0, 0], [*first, first[-1], first[-1]]  # as graphs are padded
        arrays = (int32(np.concatenate(of)) for of in (place, position))
        table = int32(np.zeros((1, 2)))
        return AttentionMetadata(*arrays, int32(first), int32(slots), table, max_q, LENGTH, LENGTH)

    def feed(self, fed: list[tuple[int, int, int, int]], max_q: int, texts=None):
        """Return convolved inputs and outputs of each row."""
        texts = self.texts if texts is None else texts
        view, parts = self.view(fed, max_q), [slice(at, at + n) for _, at, n, _ in fed]
        take = lambda of: torch.cat(  # noqa: E731
            [of[slot, part] for (slot, *_), part in zip(fed, parts, strict=True)]
        ).to(DEVICE)
        rows = triton_states.plan(view, self.standing, WINDOW, SPARE)
        sent = self.weight.to(DEVICE), self.bias.to(DEVICE)
        mixed = triton_states.convolve(rows, max_q, self.inputs, take(texts), *sent, True)
        given = mixed.split((2 * self.key_heads * KEY, self.heads * VALUE), 1)
        q, k = given[0].unflatten(1, (2, self.key_heads, KEY)).unbind(1)
        v = given[1].unflatten(1, (self.heads, VALUE))
        beta = take(self.beta) if self.has_beta else None
        out = triton_states.advance(
            rows, self.waiting, q, k, v, take(self.decay), beta, KEY**-0.5, is_unit=True
        )
        sizes = [count for _, _, count, _ in fed]
        found = zip(mixed.split(sizes), out.split(sizes), fed, strict=True)
        return [(one[: of[3]], other[: of[3]]) for one, other, of in found]

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both of whole rows, by torch in float64."""
        x = torch.nn.functional.pad(self.texts.double(), (0, 0, TAPS - 1, 0))
        mixed = torch.nn.functional.silu(torch_states.taps(x, self.weight, self.bias))
        qk, v = mixed.split((2 * self.key_heads * KEY, self.heads * VALUE), -1)
        both = torch_states.unit(qk.unflatten(-1, (2, self.key_heads, KEY)))
        both = both.repeat_interleave(self.heads // self.key_heads, 3)
        q, k = (of.transpose(1, 2) for of in both.unbind(2))
        v = v.unflatten(-1, (self.heads, VALUE)).transpose(1, 2)
        rates = self.decay.double().transpose(1, 2), self.beta.double().transpose(1, 2)
        rates = rates if self.has_beta else (rates[0], None)
        out, _, _ = torch_states.window(None, q * KEY**-0.5, k, v, *rates)
        return mixed, out.transpose(1, 2)


near = partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5, check_dtype=False)


@pytest.mark.parametrize(
    "heads, key_heads, has_beta, max_q", [(1, 1, True, 1), (2, 1, True, 3), (2, 1, False, 16)]
)
def test_random_forwards_equal_whole_rows(heads, key_heads, has_beta, max_q):
    """Prompts in pieces, windows with wrong tokens, unfed tokens, rows that wait, and new rows."""
    rows, random = Rows(heads, key_heads, has_beta, max_q), np.random.default_rng(max_q)
    mixed, out = rows.wanted()
    at, lowest = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.int64)
    compared, wrong = 0, 0
    for _ in range(14):
        fed, right = [], []
        texts = rows.texts.clone()
        for slot in range(SLOTS):
            if random.random() < 0.3:
                continue
            if at[slot] > LENGTH - 12 or random.random() < 0.1:
                at[slot] = lowest[slot] = 0
            start = int(random.integers(lowest[slot], at[slot] + 1))
            is_known = random.random() < 0.3
            count = int(random.integers(1, 12 if is_known else WINDOW + 1))
            num_fed = count if is_known else int(random.integers(0, count + 1))
            num_right = num_fed if is_known else int(random.integers(0, num_fed + 1))
            texts[slot, start + num_right : start + count] = 9.0
            wrong += num_fed - num_right
            fed.append((slot, start, count, num_fed))
            right.append(num_right)
            if num_fed:
                lowest[slot] = start + (num_fed - 1) // WINDOW * WINDOW
                at[slot] = start + num_right
        found = rows.feed(fed, max_q, texts) if fed else ()
        for (slot, start, _, _), count, (one, other) in zip(fed, right, found, strict=True):
            part = slice(start, start + count)
            near(one[:count].cpu(), mixed[slot, part])
            near(other[:count].cpu(), out[slot, part])
            compared += count
    assert compared > 30 and wrong > 4


@pytest.mark.parametrize("has_beta", [True, False])
def test_bits_do_not_depend_on_the_cut_into_windows(has_beta):
    whole, apart = (Rows(2, 1, has_beta, 0) for _ in "ab")
    ((mixed, out),) = whole.feed([(1, 0, 11, 11)], 16)
    begin, found = 0, []
    for count in (1, 5, 1, 4):
        found += apart.feed([(1, begin, count, count)], 2)
        begin += count
    assert torch.equal(mixed, torch.cat([of for of, _ in found]))
    assert torch.equal(out, torch.cat([of for _, of in found]))
    ((_, wrong),) = apart.feed([(1, begin - 4, 4, 4)], 4, apart.texts + 1)  # and these again
    ((_, again),) = apart.feed([(1, begin - 4, 4, 4)], 4)
    assert torch.equal(again, out[-4:]) and not torch.equal(wrong, again)
