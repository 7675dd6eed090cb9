"""Kernels that move planned forwards on, against the rule in numpy: on a GPU, or in triton's
interpreter."""

import numpy as np
import pytest
import torch
from test_triton_ops import DEVICE
from test_triton_ops import pytestmark as pytestmark

from bubblespec.engine.arrays import ragged
from bubblespec.engine.batch import (
    Plan,
    RowPosition,
    RowUpdates,
    draft_of,
    num_accepted,
    num_gained,
)
from bubblespec.engine.kv_cache import SPLIT, KVCache
from bubblespec.engine.ops.view import AttentionMetadata
from bubblespec.engine.pages import Pages
from bubblespec.engine.sampling import stream_counters
from bubblespec.engine.step_graphs import DeviceRows
from bubblespec.types import Load

SLOTS, MAX_LENGTH, PAGE, TOKENS, STOPS = 7, 40, 8, 64, (3, 9)


def host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def make_case(random: np.random.Generator) -> tuple[Plan, RowUpdates, np.ndarray]:
    """Return a plan, where its rows stand by then, and whether each has ended."""
    rows = int(random.integers(1, SLOTS + 1))
    prompt = random.integers(1, 12, rows)
    total = np.minimum(prompt + random.integers(4, MAX_LENGTH, rows), MAX_LENGTH)
    length = random.integers(prompt, total)
    known = np.maximum(length - random.integers(0, 6, rows), prompt)
    tokens = [random.integers(10, 20, size) for size in total]
    start, count = known - 1, np.ones(rows, np.int64)
    proposals, num_proposed = [], np.zeros(rows, np.int64)
    for row in range(rows):
        kind = random.integers(4)
        if kind == 0:  # a prompt, whose length is known
            length[row] = known[row] = prompt[row]
            start[row] = random.integers(0, prompt[row])
            count[row] = random.integers(0, prompt[row] - start[row] + 1)
        elif kind > 1:
            proposal = tokens[row][known[row] :].copy()
            proposal[random.random(len(proposal)) < 0.2] = 7
            count[row] += random.integers(0, 6)
            num_proposed[row] = min(len(proposal), count[row] - 1 + random.integers(0, 6))
            proposals.append(proposal[: num_proposed[row]])
    slots = (start + count >= known).nonzero()[0]
    num_proposed = num_proposed[slots]
    flat = np.concatenate([np.empty(0, np.int64), *proposals])
    plan = Plan(start, count, known, slots, num_proposed, flat, Load(rows, int(count.sum())))
    said = np.concatenate([of[:size] for of, size in zip(tokens, length, strict=True)])
    return plan, RowUpdates(np.arange(rows), length, prompt, total, said), random.random(rows) < 0.2


@pytest.mark.parametrize("seed", range(12))
def test_kernels_equal_the_rule_in_numpy(seed):
    from bubblespec.engine.ops import triton_rows as ops

    random = np.random.default_rng(seed)
    pages = Pages.for_rows(SLOTS, MAX_LENGTH, PAGE)
    cache = KVCache(SLOTS, pages.slot_length, 1, pages)
    rows = DeviceRows(cache, MAX_LENGTH, TOKENS, torch.device(DEVICE))
    for _ in range(4):
        plan, texts, has_ended = make_case(random)
        if not plan.count.any():
            continue
        pages.clear()
        pages.grow(texts.total)
        ids = random.integers(0, 1 << 10, (len(texts.slots), 3))
        rows.write(texts, ids)
        state = rows.state
        state.state[3, : len(has_ended)] = torch.from_numpy(has_ended)
        rows.send(plan, max_q := int(random.choice([2, 5, 16])))
        got, place, position = torch.zeros(3, TOKENS, dtype=torch.int32, device=DEVICE)
        first, slot = torch.zeros(2, SLOTS + TOKENS // 2 + 1, dtype=torch.int32, device=DEVICE)
        table = cache.block_table(torch.device(DEVICE))
        view = AttentionMetadata(
            place, position, first, slot[:-1], table, max_q, pages.slot_length, SPLIT
        )
        rows.fill(got, view)

        text = np.zeros((SLOTS, MAX_LENGTH), np.int64)
        row, offset = ragged(texts.length)
        text[row, offset] = texts.tokens
        of = plan.slots
        standing = RowPosition(text, of, texts.length[of], texts.total[of], ~has_ended[of])
        num_draft, draft = draft_of(plan, standing)
        begin = plan.start + texts.length - plan.known
        fed = plan.count.copy()
        fed[of] -= plan.num_sampled - 1 - num_draft
        fed[has_ended] = 0

        slot, offset = ragged(plan.count)
        position, is_fed = begin[slot] + offset, offset < fed[slot]
        token = text[slot, np.minimum(position, MAX_LENGTH - 1)]
        is_draft = is_fed & (position >= texts.length[slot])
        assert is_draft.sum() == len(draft)
        token[is_draft] = draft
        assert np.array_equal(host(got)[: len(slot)][is_fed], token[is_fed])
        assert np.array_equal(host(view.position)[: len(slot)][is_fed], position[is_fed])
        places = np.full(TOKENS, pages.num_pages * PAGE)
        places[: len(slot)][is_fed] = cache.places(slot[is_fed], position[is_fed])
        assert np.array_equal(host(view.place), places)
        first = host(view.first)
        sequence = np.arange(len(view.slot)).repeat(np.diff(first))
        assert np.array_equal(host(view.slot)[sequence], slot)
        assert not host(view.position)[: len(slot)][~is_fed].any(), "keys that were never written"
        assert np.diff(first).max() <= max_q

        # Draw the row's own text where there is a draft, or something else.
        sampled = plan.num_sampled
        if not (count := int(sampled.sum())):
            continue
        ops.sampled(state, count)
        row, offset = ragged(sampled)
        slot, at = of[row], texts.length[of[row]] + offset
        behind = (np.cumsum(plan.count) - plan.count - plan.start + plan.known - 1)[slot] + offset
        assert np.array_equal(host(state.behind)[:count], behind)
        generated = at - texts.prompt_length[slot]
        assert np.array_equal(host(state.generated)[:count], generated)
        words = stream_counters(*ids[slot].T, generated).view(np.int32)
        assert np.array_equal(host(state.words)[:count], words)
        drawn = random.choice([3, 9, 12, 13], count, p=[0.05, 0.05, 0.5, 0.4])
        counts = offset <= num_draft[row]
        right = counts & (offset < num_draft[row]) & (random.random(count) < 0.8)
        inside = ragged(num_draft)[0], ragged(num_draft)[1]
        proposed = np.zeros((len(of), MAX_LENGTH), np.int64)
        proposed[inside] = draft
        drawn[right] = proposed[row, offset][right]
        stops = torch.tensor(STOPS, dtype=torch.int32, device=DEVICE)
        ops.accept(state, torch.from_numpy(drawn).to(DEVICE), stops)

        token = drawn[counts]
        accepted, limit = num_accepted(token, draft, num_draft), (texts.total - texts.length)[of]
        gained = num_gained(token, accepted, num_draft, STOPS, limit=limit) * ~has_ended[of]
        row, offset = ragged(num_draft + 1)
        kept = offset < gained[row]
        text[of[row[kept]], (texts.length[of])[row[kept]] + offset[kept]] = token[kept]
        length = texts.length.copy()
        length[of] += gained
        assert np.array_equal(host(state.state)[0, : len(length)], length)
        for number, size in enumerate(length):
            assert np.array_equal(host(state.tokens)[number, :size], text[number, :size])
        is_over = has_ended | (length == texts.total)
        is_over[of] |= np.isin(text[of, length[of] - 1], STOPS) & (gained > 0)
        assert np.array_equal(host(state.state)[3, : len(length)], is_over)


def test_rows_move_with_all_that_is_known_of_them():
    cache = KVCache(3, 16, 1, Pages.for_rows(3, 16, 4))
    rows = DeviceRows(cache, 16, 8, torch.device(DEVICE))
    state = rows.state
    texts = RowUpdates(*(np.array(of) for of in ([0, 2], [3, 2], [2, 1], [9, 8], [5, 6, 7, 8, 9])))
    rows.write(texts, np.array([(1, 2, 3), (4, 5, 6)]))
    rows.move(2, 0)
    assert state.tokens[0, :2].tolist() == [8, 9] and state.state[:, 0].tolist() == [2, 1, 8, 0]
    assert torch.equal(state.counters[0], state.counters[2])
