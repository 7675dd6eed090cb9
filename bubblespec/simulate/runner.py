"""The generation engine without a model: it knows what each row will say, and each forward takes
the time that a cost model says.

Everything but the forward itself is the real `Engine`: queue, slots, shared prefills, budgets,
drafts and their rollback. A draft token is accepted if it is the one that the row says there, which
is what the coupled rule does.
"""

from collections.abc import Callable

import numpy as np

from bubblespec.draft.sources import DraftSource, TrackedRow
from bubblespec.engine.engine import Batch, Engine, Proposer
from bubblespec.engine.ragged import ragged
from bubblespec.engine.sampling import SamplingParams, num_accepted
from bubblespec.records import Load
from bubblespec.simulate.world import World
from bubblespec.types import Row

NO_TOKEN = -2  # stands behind the end of a text: no draft has it
Text = Callable[[Row, np.ndarray], np.ndarray]


class SimulatedRunner:
    """A `Runner`. text(row, tokens so far): all that a row will have said at its end, int [L],
    beginning with those tokens; asked for when the row comes into a slot, and when it goes on after
    a reset. cost.seconds(load): of a forward."""

    def __init__(
        self,
        world: World,
        rank: int,
        num_slots: int,
        max_length: int,
        *,
        max_batch_tokens: int,
        cost,
        text: Text,
    ):
        self.num_slots, self.max_length, self.max_batch_tokens = (
            num_slots,
            max_length,
            max_batch_tokens,
        )
        self.world, self.rank, self.cost, self.text = world, rank, cost, text
        self.said = np.full(
            (num_slots, max_length + 1), NO_TOKEN, np.int32
        )  # the text of the row in each slot
        self.end = np.zeros(num_slots, np.int64)  # of that text
        self.name = np.zeros((num_slots, 3), np.int64)  # of its sample
        self.drafter_knows = np.zeros(num_slots, np.int64)  # positions, where there is a drafter

    def place(self, slot: int, row: Row) -> None:
        """See `Runner`."""
        text = self.text(row, row.tokens)[: row.max_new_tokens]
        self.end[slot] = len(text)
        self.said[slot, : len(text)] = text
        self.said[slot, len(text)] = NO_TOKEN
        self.name[slot], self.drafter_knows[slot] = row.id, 0

    def move(self, source: int, target: int, length: int) -> None:
        """See `Runner`."""
        for array in (self.said, self.end, self.name, self.drafter_knows):
            array[target] = array[source]

    def share(self, source: int, target: int, length: int) -> None:
        """See `Runner`. There are no keys and values."""

    def release(self) -> None:
        """See `Runner`."""

    def forward(
        self, batch: Batch, params: SamplingParams
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `Runner`. Log-probabilities are 0."""
        self.world.compute(self.rank, self.cost.seconds(batch.load))
        if not batch.load.draft_tokens:
            said = self.said[batch.slots, batch.generated].astype(np.int64)
            return np.zeros_like(batch.slots), said, np.zeros((2, len(said)))
        row, offset = ragged(batch.num_draft + 1)
        slot = batch.slots[row]
        token = self.said[slot, np.minimum(batch.generated[row] + offset, self.end[slot])].astype(
            np.int64
        )
        return num_accepted(token, batch.draft, batch.num_draft), token, np.zeros((2, len(token)))


class SimulatedGenerator(Engine):
    """On a `SimulatedRunner`, whose forwards may be many at once."""

    may_skip = True
    """Whether nobody counts or times forwards one by one."""

    def step(
        self,
        params: SamplingParams,
        proposer: Proposer | None = None,
        max_prefill_tokens: int | None = None,
    ) -> tuple[list[Row], Load | None]:
        """See `Engine.step`. Plain forwards in which no row ends come before it, if they may and
        ranks do not share cores."""
        if self.may_skip and proposer is None and self.runner.world.cores is None:
            self._skip()
        return super().step(params, proposer, max_prefill_tokens)

    def _skip(self) -> None:
        """At once all forwards in which every row gets one more token and none ends: the same,
        sooner."""
        runner, active = self.runner, len(self.rows)
        if active == 0 or (self.queue and active < self.num_slots) or len(self.decoding()) < active:
            return
        length = self.length[:active]
        begin = length - self.prompt_length[:active]
        count = int((runner.end[:active] - begin).min()) - 1
        if count <= 0:
            return
        positions = int(length.sum())
        for i in range(count):
            runner.world.advance(
                runner.rank,
                runner.cost.seconds(Load(active, active, 0, positions + i * active, 0, 0)),
            )
        for slot, (known, said) in enumerate(zip(length.tolist(), begin.tolist(), strict=True)):
            self.tokens[slot, known : known + count] = runner.said[slot, said : said + count]
        self.num_forwards += count
        self.length[:active] += count
        self.cached[:active] += count


class ProposalTime(DraftSource):
    """A draft source that knows nothing: asked first, it lets the time of proposals pass.
    cost.propose_seconds(rows): seconds of looking for them for so many rows."""

    def __init__(self, cost, clock):
        self.cost, self.clock = cost, clock

    def propose(self, rows: list[TrackedRow], lengths: list[int], limits: list[int]) -> list[None]:
        """See `DraftSource`."""
        if rows:
            self.clock.sleep(self.cost.propose_seconds(len(rows)))
        return [None] * len(rows)
