"""Where rows stand, kept on a GPU: what a planned forward feeds, and what its rows gain, in Triton.

Both rules are those of batch.py. A plan is one vector, see
`step_graphs.packed`; all grids depend on sizes of a graph alone.

Shape legend: N tokens of a forward, B >= N of a graph, S sequences, R rows fed, T positions
sampled.
"""

import torch
import triton
import triton.language as tl

from bubblespec.engine.ops.view import AttentionMetadata, RowState

HEADER = tl.constexpr(4)  # R, N, sequences, T
ROW_FIELDS = tl.constexpr(8)
# Fields of a row in a plan.
SLOT, KNOWN, START, COUNT = (tl.constexpr(n) for n in range(4))
FIRST, PROPOSAL, NUM_PROPOSED, FIRST_SAMPLED = (tl.constexpr(n) for n in range(4, 8))
# Rows of `RowState.state`.
LENGTH, PROMPT, TOTAL, HAS_ENDED = (tl.constexpr(n) for n in range(4))
BLOCK = 128


def stand(rows: RowState) -> None:
    """Find out where the rows of a plan stand, and how much of their drafts is fed."""
    num_slots, max_length = rows.tokens.shape
    _stand[(num_slots,)](
        rows.plan, rows.tokens, rows.state, rows.standing, num_slots, max_length, BLOCK=BLOCK,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _row_field(plan_ptr, row, field):
    return plan_ptr + HEADER + field * tl.load(plan_ptr) + row


@triton.jit
def _proposals(plan_ptr):
    """Return where the proposals of a plan begin."""
    rows, tokens = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    sequences, sampled = tl.load(plan_ptr + 2), tl.load(plan_ptr + 3)
    return plan_ptr + HEADER + ROW_FIELDS * rows + tokens + 2 * sequences + 1 + sampled


@triton.jit
def _stand(
    plan_ptr, tokens_ptr, state_ptr, standing_ptr, num_slots, max_length, BLOCK: tl.constexpr
):
    """One row: its first position, tokens of its draft, and tokens fed in all, 0 behind its end."""
    row = tl.program_id(0)
    if row >= tl.load(plan_ptr):
        return
    slot = tl.load(_row_field(plan_ptr, row, SLOT))
    known = tl.load(_row_field(plan_ptr, row, KNOWN))
    start = tl.load(_row_field(plan_ptr, row, START))
    count = tl.load(_row_field(plan_ptr, row, COUNT))
    num_proposed = tl.load(_row_field(plan_ptr, row, NUM_PROPOSED))
    proposal_ptr = _proposals(plan_ptr) + tl.load(_row_field(plan_ptr, row, PROPOSAL))
    length = tl.load(state_ptr + LENGTH * num_slots + slot)
    total = tl.load(state_ptr + TOTAL * num_slots + slot)
    has_ended = tl.load(state_ptr + HAS_ENDED * num_slots + slot)
    gained = length - known
    num_wrong = 0
    text_ptr = tokens_ptr + slot.to(tl.int64) * max_length + known
    for begin in range(0, tl.minimum(gained, num_proposed), BLOCK):
        offset = begin + tl.arange(0, BLOCK)
        inside = offset < tl.minimum(gained, num_proposed)
        text = tl.load(text_ptr + offset, mask=inside, other=0)
        proposed = tl.load(proposal_ptr + offset, mask=inside, other=0)
        num_wrong += tl.sum((text != proposed).to(tl.int32), 0)
    width = start + count - known
    left = tl.minimum(tl.minimum(num_proposed - gained, width), total - 1 - length)
    num_draft = tl.where(num_wrong == 0, tl.maximum(left, 0), 0)
    num_draft = tl.where(has_ended == 0, num_draft, 0)
    num_fed = tl.where(has_ended == 0, count - tl.maximum(width, 0) + num_draft, 0)
    tl.store(standing_ptr + row, start + gained)
    tl.store(standing_ptr + num_slots + row, num_draft)
    tl.store(standing_ptr + 2 * num_slots + row, num_fed)


def fill(
    rows: RowState, ids: torch.Tensor, view: AttentionMetadata, page_size: int, spare: int
) -> None:
    """Write what a forward reads, as `graphs.padded` does: token ids int32 [B], and its view.

    The view has its table and sizes. spare: place of tokens that are not fed."""
    num_slots, max_length = rows.tokens.shape
    size, sequences = ids.shape[0], view.slot.shape[0]
    _fill[(triton.cdiv(max(size, sequences + 1), BLOCK),)](
        rows.plan, rows.tokens, rows.state, rows.standing, view.table, ids, view.place,
        view.position, view.first, view.slot, num_slots, max_length, view.table.stride(0),
        page_size, spare, size, sequences, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _fill(
    plan_ptr, tokens_ptr, state_ptr, standing_ptr, table_ptr, ids_ptr, place_ptr, position_ptr,
    first_ptr, slot_ptr, num_slots, max_length, table_stride, page_size, spare, size,
    sequences, BLOCK: tl.constexpr,
):  # fmt: skip
    num_rows, num_tokens = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    num_sequences = tl.load(plan_ptr + 2)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows_ptr = plan_ptr + HEADER + ROW_FIELDS * num_rows
    is_token = number < num_tokens
    row = tl.load(rows_ptr + number, mask=is_token, other=0)
    slot = tl.load(_row_field(plan_ptr, row, SLOT), mask=is_token, other=0)
    known = tl.load(_row_field(plan_ptr, row, KNOWN), mask=is_token, other=0)
    first = tl.load(_row_field(plan_ptr, row, FIRST), mask=is_token, other=0)
    proposal = tl.load(_row_field(plan_ptr, row, PROPOSAL), mask=is_token, other=0)
    start = tl.load(standing_ptr + row, mask=is_token, other=0)
    num_fed = tl.load(standing_ptr + 2 * num_slots + row, mask=is_token, other=0)
    is_fed = is_token & (number - first < num_fed)
    # Tokens that are not fed see the row's first key alone: later ones may not have been written.
    position = tl.where(is_fed, start + number - first, 0)
    is_known = position < tl.load(state_ptr + LENGTH * num_slots + slot, mask=is_fed, other=0)
    text = tl.load(
        tokens_ptr + slot.to(tl.int64) * max_length + position, mask=is_fed & is_known, other=0
    )
    proposed_ptr = _proposals(plan_ptr) + proposal + position - known
    proposed = tl.load(proposed_ptr, mask=is_fed & (is_known == 0), other=0)
    page = tl.load(table_ptr + slot * table_stride + position // page_size, mask=is_fed, other=0)
    place = tl.where(is_fed, page * page_size + position % page_size, spare)
    tl.store(ids_ptr + number, tl.where(is_known, text, proposed), mask=number < size)
    tl.store(place_ptr + number, place, mask=number < size)
    tl.store(position_ptr + number, position, mask=number < size)
    # Sequences, then empty ones.
    is_sequence = number < num_sequences
    of_row = tl.load(rows_ptr + num_tokens + number, mask=is_sequence, other=0)
    of_slot = tl.load(_row_field(plan_ptr, of_row, SLOT), mask=is_sequence, other=0)
    first_ptr_of = rows_ptr + num_tokens + num_sequences + number
    first_of = tl.load(first_ptr_of, mask=number <= num_sequences, other=0)
    tl.store(slot_ptr + number, of_slot, mask=number < sequences)
    first_of = tl.where(number <= num_sequences, first_of, num_tokens)
    tl.store(first_ptr + number, first_of, mask=number <= sequences)


def sampled(rows: RowState, count: int) -> None:
    """Write where `count` positions, T of them real, are sampled, and their noise's counters."""
    num_slots = rows.tokens.shape[0]
    _sampled[(triton.cdiv(count, BLOCK),)](
        rows.plan, rows.state, rows.counters, rows.behind, rows.words, rows.generated, num_slots,
        count, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _sampled(
    plan_ptr, state_ptr, counters_ptr, behind_ptr, words_ptr, generated_ptr, num_slots, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    num_rows, num_tokens = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    num_sequences = tl.load(plan_ptr + 2)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = number < tl.load(plan_ptr + 3)
    rows_ptr = plan_ptr + HEADER + ROW_FIELDS * num_rows + num_tokens + 2 * num_sequences + 1
    row = tl.load(rows_ptr + number, mask=is_real, other=0)
    slot = tl.load(_row_field(plan_ptr, row, SLOT), mask=is_real, other=0)
    known = tl.load(_row_field(plan_ptr, row, KNOWN), mask=is_real, other=0)
    start = tl.load(_row_field(plan_ptr, row, START), mask=is_real, other=0)
    first = tl.load(_row_field(plan_ptr, row, FIRST), mask=is_real, other=0)
    begin = tl.load(_row_field(plan_ptr, row, FIRST_SAMPLED), mask=is_real, other=0)
    length = tl.load(state_ptr + LENGTH * num_slots + slot, mask=is_real, other=0)
    prompt = tl.load(state_ptr + PROMPT * num_slots + slot, mask=is_real, other=0)
    offset = number - begin
    generated = tl.where(is_real, length - prompt + offset, 0)
    inside = number < count
    behind = tl.where(is_real, first + known - start - 1 + offset, 0)
    tl.store(behind_ptr + number, behind, mask=inside)
    tl.store(generated_ptr + number, generated, mask=inside)
    for word in tl.static_range(4):
        value = tl.load(counters_ptr + slot * 4 + word, mask=is_real, other=0)
        if word == 0:
            value = value | generated
        tl.store(words_ptr + number * 4 + word, value, mask=inside)


def accept(rows: RowState, token: torch.Tensor, stops: torch.Tensor) -> None:
    """Append what rows gain of the tokens int64 [T or more] drawn; stops: int32, stop tokens."""
    num_slots, max_length = rows.tokens.shape
    _accept[(num_slots,)](
        rows.plan, token, stops, rows.tokens, rows.state, rows.standing, num_slots, max_length,
        STOPS=stops.shape[0], BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip


@triton.jit
def _accept(
    plan_ptr, token_ptr, stops_ptr, tokens_ptr, state_ptr, standing_ptr, num_slots, max_length,
    STOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its accepted draft tokens and the next one, up to a stop token and its limit."""
    row = tl.program_id(0)
    if row >= tl.load(plan_ptr):
        return
    begin = tl.load(_row_field(plan_ptr, row, FIRST_SAMPLED))
    if (begin < 0) | (tl.load(standing_ptr + 2 * num_slots + row) == 0):
        return
    slot = tl.load(_row_field(plan_ptr, row, SLOT))
    length_ptr = state_ptr + LENGTH * num_slots + slot
    length, total = tl.load(length_ptr), tl.load(state_ptr + TOTAL * num_slots + slot)
    num_draft = tl.load(standing_ptr + num_slots + row)
    gained = length - tl.load(_row_field(plan_ptr, row, KNOWN))
    draft_ptr = _proposals(plan_ptr) + tl.load(_row_field(plan_ptr, row, PROPOSAL)) + gained
    text_ptr = tokens_ptr + slot.to(tl.int64) * max_length + length
    # The last token gained is the first that is wrong, behind the draft, a stop token or the last
    # one that fits.
    last = total - length - 1
    for block in range(0, num_draft + 1, BLOCK):
        offset = block + tl.arange(0, BLOCK)
        inside = offset <= num_draft
        drawn = tl.load(token_ptr + begin + offset, mask=inside, other=-1).to(tl.int32)
        proposed = tl.load(draft_ptr + offset, mask=offset < num_draft, other=-2)
        ends = inside & (drawn != proposed)
        for number in tl.static_range(STOPS):
            ends = ends | (inside & (drawn == tl.load(stops_ptr + number)))
        last = tl.minimum(last, tl.min(tl.where(ends, offset, total), 0))
        tl.store(text_ptr + offset, drawn, mask=inside & (offset <= last))
    final = tl.load(token_ptr + begin + last).to(tl.int32)
    has_ended = length + last + 1 >= total
    for number in tl.static_range(STOPS):
        has_ended = has_ended | (final == tl.load(stops_ptr + number))
    tl.store(length_ptr, length + last + 1)
    tl.store(state_ptr + HAS_ENDED * num_slots + slot, has_ended.to(tl.int32))
