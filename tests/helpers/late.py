"""A runner on a CPU whose results come late, as a GPU's do."""

from collections.abc import Callable

import numpy as np

from bubblespec import setup
from bubblespec.engine.arrays import ragged
from bubblespec.engine.batch import (
    Batch,
    Plan,
    RowPosition,
    RowUpdates,
    SamplerOutput,
    SamplingParams,
    draft_of,
    is_stop,
    num_accepted,
    num_gained,
)
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms.tp_tail import tail

JUNK = -7  # a token at positions that do not count


class LateRunner(ModelRunner):
    """Knows where its rows stand from texts and its own forwards alone.

    `depths` decides, forward by forward, how many are in flight."""

    supports_overlap = True
    depths: Callable[[], int] = staticmethod(lambda: 1)

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.tokens = np.zeros((self.num_slots, self.max_length), np.int64)
        self.length, self.prompt_length, self.total = np.zeros((3, self.num_slots), np.int64)
        self.has_ended = np.ones(self.num_slots, bool)
        self.num_masked = 0  # rows fed after their end

    @property
    def depth(self) -> int:
        return self.depths()

    def move(self, source: int, target: int, length: int) -> None:
        super().move(source, target, length)
        for of in (self.tokens, self.length, self.prompt_length, self.total, self.has_ended):
            of[target] = of[source]

    def launch_ahead(
        self, plan: Plan, texts: RowUpdates, params: SamplingParams, batch: Batch | None
    ) -> Callable[[], SamplerOutput]:
        row, offset = ragged(texts.length)
        self.tokens[texts.slots[row], offset] = texts.tokens
        for of in ("length", "prompt_length", "total"):
            getattr(self, of)[texts.slots] = getattr(texts, of)
        self.has_ended[texts.slots] = False

        sampled = plan.num_sampled
        is_open = ~self.has_ended[plan.slots]
        standing = self.length[plan.slots], self.total[plan.slots], is_open
        num_draft, draft = draft_of(plan, RowPosition(self.tokens, plan.slots, *standing))
        self.num_masked += int((~is_open).sum())
        start, count, slots = plan.start.copy(), plan.count.copy(), plan.slots[is_open]
        start[plan.slots] += standing[0] - plan.known[plan.slots]
        assert ((start + count)[plan.slots] <= standing[1]).all(), "fed beyond the end of a row"
        count[plan.slots] -= sampled - 1 - num_draft
        count[plan.slots[~is_open]] = 0
        num_draft = num_draft[is_open]

        places = np.repeat(is_open, sampled)
        row, offset = ragged(sampled)
        places[is_open[row]] = offset[is_open[row]] <= num_draft.repeat(sampled[is_open])
        late = SamplerOutput(np.full(len(places), JUNK), np.full(len(places), np.nan))
        if count.any():
            fed = self._batch(plan, start, count, slots, num_draft, draft)
            drawn = super().launch(fed, params)()
            late.token[places], late.logprob[places] = drawn
            self._append(fed, drawn, params)
        return lambda: late

    def _batch(self, plan, start, count, slots, num_draft, draft) -> Batch:
        slot, offset = ragged(count)
        index = np.array((slot, start[slot] + offset))
        tokens = self.tokens[slot, index[1]]
        tokens[index[1] >= self.length[slot]] = draft
        generated = self.length[slots] - self.prompt_length[slots]
        load = plan.load._replace(draft_tokens=len(draft))
        return Batch(start, count, index, tokens, slots, generated, num_draft, draft, load)

    def _append(self, batch: Batch, drawn: SamplerOutput, params: SamplingParams) -> None:
        slots, num_draft = batch.slots, batch.num_draft
        if not len(slots):
            return
        accepted = num_accepted(drawn.token, batch.draft, num_draft)
        limit, stops = self.total[slots] - self.length[slots], params.stop_token_ids
        gained = num_gained(drawn.token, accepted, num_draft, stops, limit=limit)
        row, offset = ragged(num_draft + 1)
        kept = offset < gained[row]
        row, offset, token = row[kept], offset[kept], drawn.token[kept]
        self.tokens[slots[row], self.length[slots][row] + offset] = token
        self.length[slots] += gained
        is_last = is_stop(token[gained.cumsum() - 1], stops)
        self.has_ended[slots] = is_last | (self.length[slots] >= self.total[slots])


class RandomlyLateRunner(LateRunner):
    """One to three forwards are in flight."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        random = np.random.default_rng(0)
        self.depths = lambda: int(random.integers(1, 4))


def results_come_late(monkeypatch) -> None:
    """Let runs generate so; ranks of a TP tail have to agree on what is in flight."""
    monkeypatch.setattr(setup, "ModelRunner", RandomlyLateRunner)
    monkeypatch.setattr(tail, "ModelRunner", LateRunner)
