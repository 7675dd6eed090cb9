"""The rollout loop with drafting ahead: own rows against plain generation, drafts against what
their own step would generate.

Plain generation (`Engine.run` in a fresh engine without a proposer) is the oracle throughout.
The other rank is played by `BoardWithSlowRank`, so that a bubble is as long as a test wants it; at
the end two ranks run against each other, in virtual time and as real processes. No test depends on
how long anything takes.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from bubblespec.idle.draft_planning import Item, Outlook, plan_items

from bubblespec.dist.ranks import Ranks
from bubblespec.draft.proposer import make_proposer
from bubblespec.draft.store import DraftStore
from bubblespec.draft.suffix import History
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.idle.draft_ahead import DraftAhead
from bubblespec.planner.costs import CostModel
from bubblespec.records import Load, RolloutRecord
from bubblespec.rollout.board import ProgressBoard, RankState
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.simulate.world import SimulatedRanks, SimulatedTicks
from bubblespec.simulate.world import World as VirtualTime
from bubblespec.types import Draft, Group, Prompt, Row, SampleId
from tests.helpers.clocks import Clock, forward_seconds
from tests.helpers.models import VOCAB, small_config
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import make_rows, run_loop

SEED = 5
PARAMS = SamplingParams(temperature=0.9, stop_token_ids=(5, 11, 20, 33))
LIMIT = 40
MAX_LENGTH = 100
ALONE = Ranks(torch.device("cpu"))
# The same prompts in every step, each time on a further visit: what an earlier step has left in the
# engine is a temptation to share it.
PROMPTS = [Prompt(900 + n, "", tuple(range(1 + n, 4 + 5 * n)), {}) for n in range(3)]
FOUR_PROMPTS = [*PROMPTS, Prompt(7, "", (9, 8, 7), {})]


def groups_of(step: int, prompts=PROMPTS) -> list[Group]:
    """What a step starts: its visit of each prompt has its number."""
    return [Group(prompt, step) for prompt in prompts]


def rows_of(step: int, prompts=PROMPTS, num_generations: int = 2, limit: int = LIMIT) -> list[Row]:
    return make_rows(groups_of(step, prompts), num_generations, limit)


def new_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = small_config("llama")
    config.num_hidden_layers, config.layer_types = 1, None
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
    prepare_model(model, MAX_LENGTH)
    return model


def update(model, number: int) -> None:
    """Other weights, so near that some drafts stay right for a while."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                1 + 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )


def fixed_cost(a: float = 1.0, b: float = 1e-4, c: float = 1e-4) -> CostModel:
    """Costs that no measurement changes. By default draft rows and draft tokens are next to
    free."""
    cost = CostModel(refresh=1 << 60)
    cost.coefficients = np.array([a, b, c, 0.0, 0.0])
    return cost


def as_dict(rows: list[Row]) -> dict:
    return {row.id: (row.tokens.tolist(), row.finish) for row in rows}


def plain(
    model, step: int, prompts=PROMPTS, num_generations: int = 2, limit: int = LIMIT
) -> tuple[dict, int]:
    """What plain generation gives for a step under the weights as they are, and in how many
    forwards."""
    engine = Engine(ModelRunner(model, 64, MAX_LENGTH, SEED))
    return as_dict(
        engine.run(rows_of(step, prompts, num_generations, limit), PARAMS)
    ), engine.num_forwards


def check_plain(ranks_rows: list[list[Row]]) -> None:
    """The rows of all ranks are those of `plain_rows`, each on one rank, tokens and
    log-probabilities alike."""
    wanted, found = (
        {row.id: row for row in plain_rows()},
        [row for rows in ranks_rows for row in rows],
    )
    assert len(found) == len(wanted) and as_dict(found) == as_dict(list(wanted.values()))
    for row in found:
        for name in ("logprob", "full_logprob"):
            np.testing.assert_allclose(getattr(row, name), getattr(wanted[row.id], name), atol=1e-6)


def plain_rows() -> list[Row]:
    """Three responses to each of four prompts, generated plainly."""
    return Engine(ModelRunner(new_model(), 64, MAX_LENGTH, SEED)).run(
        rows_of(0, FOUR_PROMPTS, 3), PARAMS
    )


def one_rank() -> ProgressBoard:
    ranks = Ranks(torch.device("cpu"))
    ranks.clock = Clock()
    return ProgressBoard(ranks, timeout_s=100, interval_s=0)


class BoardWithSlowRank:
    """The board as rank 0 of two sees it; rank 1 is done after `num_ticks` ticks. A tick is
    complete between any two forwards, or, with a `lag`, only so many polls later."""

    def __init__(self, num_ticks: int, lag: int = 0):
        self.ranks = SimpleNamespace(rank=0, world_size=2, must_stop=False, clock=Clock())
        self.last_tick, self.lag = num_ticks, lag

    def begin(self) -> None:
        self.num_ticks, self.num_polls, self.is_over, self.are_others_done = 0, 0, False, False

    def poll(self, state, is_urgent: bool = True) -> list[RankState] | None:
        self.num_polls += 1
        return None if self.num_polls % (self.lag + 2) else self.wait(state)

    def wait(self, state) -> list[RankState] | None:
        if self.is_over:
            return None
        own = state()
        self.num_ticks += 1
        self.are_others_done = self.num_ticks >= self.last_tick
        self.is_over = own.is_done and self.are_others_done
        return [own, RankState(int(not self.are_others_done), facts=np.zeros_like(own.facts))]


class World:
    """One rank from step to step. `forwards` has, of the last rollout, own rows left and draft rows
    in the engine by forward."""

    def __init__(
        self,
        model,
        num_slots: int,
        board,
        method="bubble+suffix",
        cost=None,
        max_tokens=10**6,
        max_batch_tokens=256,
    ):
        self.model, self.board = model, board
        has_drafts, cost = "bubble" in method, cost or fixed_cost()
        self.proposer = make_proposer(
            method, History(10**6), cost, has_drafts=has_drafts, clock=board.ranks.clock
        )
        self.engine = Engine(
            ModelRunner(model, num_slots, MAX_LENGTH, SEED, max_batch_tokens=max_batch_tokens)
        )
        self.store = DraftStore(max_tokens)
        self.forwards = []

    def items(self, step: int, coming, prompts=PROMPTS, num_generations: int = 2) -> list[Item]:
        """All that is left to draft during `step` for some coming steps, in order."""
        items = []
        for group in (group for visit in coming for group in groups_of(visit, prompts)):
            for sample in map(group.sample, range(num_generations)):
                draft = self.store.get(sample)
                if draft is None or not draft.is_finished:
                    holder = draft.holder if draft else -1
                    items.append(
                        Item(sample, group.prompt.token_ids, group.visit - step, True, holder)
                    )
        return items

    def rollout(
        self, step, rows, items, drafts=None, limit=LIMIT, max_slowdown=1.0
    ) -> tuple[RolloutRecord, dict[SampleId, Draft]]:
        """Nothing is drafted ahead where `items` is None. Returns also the drafts that were
        made."""
        self.proposer.begin()
        for row in rows:
            draft = drafts[row.id] if drafts and row.id in drafts else self.store.get(row.id)
            self.proposer.track(row, draft, step)
        works = []
        if items is not None:
            options = {"version": step, "max_new_tokens": limit, "max_slowdown": max_slowdown}
            works = [DraftAhead(lambda seen: items, self.store, self.proposer, **options)]
        own, step_engine, self.forwards = {id(row) for row in rows}, self.engine.step, []

        def noted_step(*arguments) -> tuple[list[Row], Load]:
            num_ahead = sum(id(row) not in own for row in [*self.engine.rows, *self.engine.queue])
            num_own = len(self.engine.rows) + len(self.engine.queue) - num_ahead
            self.forwards.append((num_own, num_ahead))
            return step_engine(*arguments)

        self.engine.step = noted_step
        loop = RolloutLoop(
            self.engine,
            self.board.ranks,
            PARAMS,
            proposer=self.proposer,
            board=self.board,
            works=works,
        )
        record = run_loop(loop, rows)
        del self.engine.step
        assert [
            (forward.own_rows, forward.ahead_rows) for forward in record.forwards
        ] == self.forwards
        self.store.drop(row.id for row in rows)
        for work in works:
            work.merge(ALONE)
        return record, works[0].drafts if works else {}


def made_up(wanted: dict, seed: int) -> dict:
    """Drafts right, wrong, cut, overlong and empty, and rows without one, by turns."""
    rng, drafts = np.random.default_rng(seed), {}
    for number, (key, (tokens, _)) in enumerate(wanted.items()):
        noise = rng.integers(1, VOCAB, 60).tolist()
        kinds = [tokens, noise, tokens[: len(tokens) // 2], tokens + noise, [], None]
        kind = kinds[(number + seed) % len(kinds)]
        drafts[key] = None if kind is None else Draft(np.array(kind, np.int32), number % 2 == 0, 0)
    return drafts


@pytest.mark.parametrize("num_slots", [2, 5, 24])
@pytest.mark.parametrize("bubbles", ["none", "soft", "hard", "both"])
def test_own_rows_are_those_of_plain_generation(bubbles, num_slots):
    """Whatever is drafted beside them, from whatever drafts they start, with weights that change in
    each step."""
    model = new_model()
    world = World(
        model,
        num_slots,
        BoardWithSlowRank(120 if num_slots == 2 else 45)
        if bubbles in ("hard", "both")
        else one_rank(),
    )
    accepted = drafted = 0
    for step in range(3):
        update(model, step)
        wanted, _ = plain(model, step)
        drafts = made_up(wanted, step)
        if step:  # every other row goes by what was drafted under the weights before
            drafts = {key: draft for key, draft in drafts.items() if key.sample}
        rows = rows_of(step)
        items = None if bubbles == "none" else world.items(step, (step + 1, step + 2))
        record, _ = world.rollout(
            step, rows, items, drafts, max_slowdown=0.0 if bubbles == "hard" else 1.0
        )
        assert as_dict(rows) == wanted
        accepted += record.acceptance.accepted_tokens
        drafted += record.drafted_tokens
        assert record.own_forwards + record.hard_forwards == len(world.forwards)
        assert record.own_forwards == sum(num_own > 0 for num_own, _ in world.forwards)
    assert accepted > 20
    assert (drafted > 20) == (bubbles != "none")


def test_drafts_are_what_their_step_generates():
    """Under the same weights: token for token, so all of them are accepted, in far fewer
    forwards."""
    model = new_model()
    world = World(model, 24, BoardWithSlowRank(90), method="bubble")
    world.rollout(0, rows_of(0), world.items(0, (1,)))
    wanted, num_forwards = plain(model, 1)
    assert len({len(tokens) for tokens, _ in wanted.values()}) > 2
    for key, (tokens, _) in wanted.items():
        assert world.store.get(key).tokens.tolist() == tokens and world.store.get(key).is_finished
    rows = rows_of(1)
    record, _ = world.rollout(1, rows, None)
    assert as_dict(rows) == wanted
    counts = record.acceptance
    assert counts.draft_tokens == counts.accepted_tokens > 0.8 * counts.gained_tokens
    assert set(counts.by_source) == {"aligned"} and set(counts.by_age) == {1}
    assert record.own_forwards < 0.3 * num_forwards


@pytest.mark.parametrize("between", ["nothing", "an evaluation", "a full store"])
def test_drafts_go_on_over_several_rollouts(between):
    """Preempted and continued, in the engine or from their tokens: still what plain generation
    gives, each token made once."""
    model, bound = new_model(), 50 if between == "a full store" else 10**6
    world = World(model, 8, one_rank(), max_tokens=bound)
    wanted, _ = plain(model, 9, limit=60)
    total, stayed, finished_in = 0, 0, []
    for step in range(8):
        rows, items = rows_of(step, PROMPTS[:1], limit=12), world.items(step, (9,))
        before = {row.id: row for row in world.engine.rows}
        record, made = world.rollout(step, rows, items, limit=60, max_slowdown=100.0)
        assert as_dict(rows) == plain(model, step, PROMPTS[:1], limit=12)[0]
        total += record.drafted_tokens
        for key, draft in made.items():
            tokens, _ = wanted[key]
            assert draft.tokens.tolist() == tokens[: len(draft.tokens)] and draft.version == step
            assert draft.is_finished == (len(draft.tokens) == len(tokens))
            if draft.is_finished:
                finished_in.append(step)
            if draft.holder == 0:
                row = next(row for row in world.engine.rows if row.id == key)
                assert (
                    row in world.engine.decoding() and row.tokens.tolist() == draft.tokens.tolist()
                )
                stayed += before.get(key) is row
        assert sum(draft.holder == 0 for draft in made.values()) <= 8 - len(rows)
        if between == "an evaluation":
            world.engine.reset()
            world.engine.run(rows_of(99, PROMPTS, 3, 7), PARAMS)
    assert world.store.num_tokens <= bound
    if between == "a full store":
        return
    assert {key: world.store.get(key).tokens.tolist() for key in wanted} == {
        key: tokens for key, (tokens, _) in wanted.items()
    }
    assert total == sum(len(tokens) for tokens, _ in wanted.values())
    assert len(set(finished_in)) > 1 and max(finished_in) > 3, (
        "several rollouts must have had their part in it"
    )
    assert (stayed > 0) == (between == "nothing"), (
        "the same row goes on where the engine was left alone"
    )


def test_own_rows_are_exact_beside_rows_over_old_keys_and_values():
    """A draft that stays in the engine while weights change has its prompt in common with own rows,
    but must not share it."""
    model = new_model()
    world = World(model, 10, one_rank())
    num_staying = 0
    for step in range(5):
        update(model, step)
        wanted, _ = plain(model, step, limit=8)
        rows = rows_of(step, limit=8)
        _, made = world.rollout(step, rows, world.items(step, (7,)), limit=60, max_slowdown=100.0)
        assert as_dict(rows) == wanted
        num_staying += sum(draft.holder == 0 for draft in made.values())
    assert num_staying > 3


def test_rows_where_nothing_is_drafted_ahead():
    """Without uses of idle time the rank decodes its rows and leaves, without a tick."""
    model = new_model()
    world = World(model, 24, BoardWithSlowRank(60))
    rows = rows_of(0)
    record, made = world.rollout(0, rows, None)
    assert as_dict(rows) == plain(model, 0)[0]
    assert (
        not made
        and record.drafted_tokens == record.hard_forwards == record.num_ticks == 0
        and record.own_forwards > 10
    )


def test_a_rank_without_rows_only_drafts():
    model = new_model()
    world = World(model, 4, BoardWithSlowRank(200))
    record, made = world.rollout(0, [], world.items(0, (1,)))
    wanted, _ = plain(model, 1)
    assert {key: draft.tokens.tolist() for key, draft in made.items()} == {
        key: tokens for key, (tokens, _) in wanted.items()
    }
    assert (
        record.own_forwards == 0
        and record.own_s == 0
        and record.drafted_tokens == sum(len(t) for t, _ in wanted.values())
    )


@pytest.mark.parametrize("max_slowdown", [0.0, 1.0])
def test_no_forward_begins_once_all_are_done(max_slowdown):
    """A rank whose rows end after those of all others leaves at once, and drafts nothing that all
    would wait for."""
    model = new_model()
    for lag in range(5):
        world = World(model, 24, BoardWithSlowRank(1, lag))
        record, _ = world.rollout(
            0, rows_of(0, limit=6), world.items(0, (1, 2)), max_slowdown=max_slowdown
        )
        assert record.hard_forwards == 0 and (record.drafted_tokens > 0) == (max_slowdown > 0)


def test_which_drafts_stay_in_the_engine():
    """The longest of those beyond the next step, whose own rows need the other slots; none that is
    still fed its prompt."""
    model = new_model()
    world = World(model, 8, BoardWithSlowRank(22))
    _, made = world.rollout(
        0, rows_of(0, limit=12), world.items(0, (1,)) + world.items(0, (4,)), limit=80
    )
    unfinished = {key: draft for key, draft in made.items() if not draft.is_finished}
    staying = {key: draft for key, draft in unfinished.items() if draft.holder == 0}
    assert len(staying) == 8 - 6 and any(key.visit == 1 for key in unfinished)
    shortest = min(len(draft.tokens) for draft in staying.values())
    assert all(
        key in staying or len(draft.tokens) <= shortest
        for key, draft in unfinished.items()
        if key.visit == 4
    )
    assert all(key.visit == 4 for key in staying)
    # 20 tokens of a prompt of 60 fit in a forward: the third draft begins last, and has no more
    # than a part of its prompt.
    prompts = [Prompt(50 + n, "", tuple(range(1 + n, 61 + n)), {}) for n in range(3)]
    world = World(model, 8, one_rank(), max_batch_tokens=20)
    rows = rows_of(0, PROMPTS[:1], 1, 10)
    world.rollout(0, rows, world.items(0, (4,), prompts, 1), max_slowdown=100.0)
    states = {row.id: row in world.engine.decoding() for row in world.engine.rows}
    assert set(states.values()) == {True, False}
    for prompt in prompts:
        draft = world.store.get(sample := SampleId(prompt.uid, 4, 0))
        assert (draft is not None and draft.holder == 0) == states[sample]


def test_items_that_do_not_pay_wait_for_the_end_of_own_rows():
    model = new_model()
    for idle_only in (True, False):
        world = World(model, 24, BoardWithSlowRank(60))
        items = [replace(item, pays=not idle_only) for item in world.items(0, (1,))]
        world.rollout(0, rows_of(0), items, max_slowdown=100.0)
        beside_own = sum(num_ahead for num_own, num_ahead in world.forwards if num_own)
        assert (beside_own == 0) == idle_only and world.store.num_tokens > 0


@pytest.mark.parametrize("max_slowdown", [0.0, 0.3, 0.7])
def test_drafts_slow_own_rows_within_bounds(max_slowdown):
    """Rows cost 1 ms and a forward 1 ms: 6 own rows take 7 ms, of which `max_slowdown` may be
    added, from the first forward. It bounds new drafts and those that are still in the engine from
    the rollout before."""
    model = new_model()
    world = World(model, 24, BoardWithSlowRank(50), cost=fixed_cost(1e-3, 5e-4, 5e-4))
    bound = int(max_slowdown * 7)
    most = resumed = 0
    for step in range(3):
        items = world.items(step, (4, 5))
        resumed += len(world.engine.rows)
        world.rollout(step, rows_of(step, limit=12), items, limit=80, max_slowdown=max_slowdown)
        most = max(most, *(num_ahead for num_own, num_ahead in world.forwards if num_own))
        # In a hard bubble a forward of a single draft is as long as it may get, but those that are
        # there go on.
        in_bubble = [num_ahead for num_own, num_ahead in world.forwards if not num_own]
        assert all(num_ahead <= max(bound, 1) for num_ahead in in_bubble) and (step or in_bubble)
    assert most == bound and resumed > 0


def test_own_prompts_are_not_slowed_by_drafts():
    """Prompts that take several forwards: the limit on prompt tokens beside own rows is one for the
    prompts of drafts."""
    model = new_model()
    prompts = [Prompt(50 + n, "", tuple(range(1 + n, 50 + n)), {}) for n in range(4)]
    _, num_forwards = plain(model, 0, prompts, 1, limit=10)
    engine = Engine(ModelRunner(model, 24, MAX_LENGTH, SEED, max_batch_tokens=30))
    engine.run(rows_of(0, prompts, 1, 10), PARAMS)
    assert engine.num_forwards > num_forwards + 4
    world = World(
        model,
        24,
        one_rank(),
        method="bubble",
        cost=fixed_cost(1e-3, 1e-5, 1e-3),
        max_batch_tokens=30,
    )
    record, _ = world.rollout(0, rows_of(0, prompts, 1, 10), world.items(0, (1,)))
    assert record.own_forwards <= engine.num_forwards


def play_two_ranks(ranks: Ranks, board: ProgressBoard, num_rollouts: int) -> list[dict]:
    """Rank 0 has one of four prompts and rank 1 three; both draft two steps ahead by the same
    plan."""
    prompts, owners = FOUR_PROMPTS, [0, 1, 1, 1]
    world = World(new_model(), 10, board)
    if isinstance(ranks, SimulatedRanks):
        pass_time(world.engine, ranks)
    outlook, history, results = Outlook(), History(1000), []
    for step in range(num_rollouts):
        outlook.learn(np.array([3, 7, 13, 20]), np.array([10, 14, 20, 35]) + step)
        coming = [groups_of(s, prompts) for s in (step + 1, step + 2)]
        planned = plan_items(
            coming, 2, world.store, history, outlook=outlook, forwards_per_step=30.0
        )
        rows = rows_of(
            step,
            [prompt for prompt, owner in zip(prompts, owners, strict=True) if owner == ranks.rank],
        )
        world.proposer.begin()
        for row in rows:
            world.proposer.track(row, world.store.get(row.id), step)
        # Of those that no rank goes on with, the less urgent half waits for the end of a rank's
        # rows.
        free = [item for item in planned if item.holder < 0]
        begun = [replace(item, pays=True) for item in planned if item.holder >= 0]
        items = [
            replace(item, pays=number < len(free) // 2) for number, item in enumerate(free)
        ] + begun
        options = {"version": step, "max_new_tokens": LIMIT, "max_slowdown": 1.0}
        ahead = DraftAhead(lambda seen, items=items: items, world.store, world.proposer, **options)
        loop = RolloutLoop(
            world.engine, ranks, PARAMS, proposer=world.proposer, board=world.board, works=[ahead]
        )
        record = run_loop(loop, rows)
        world.store.drop(
            group.sample(number) for group in groups_of(step, prompts) for number in range(2)
        )
        ahead.merge(ranks)
        keys = [
            group.sample(number) for groups in coming for group in groups for number in range(2)
        ]
        drafts = {key: world.store.get(key) for key in keys}
        results.append(
            {
                "rows": [[*row.id, row.tokens.tolist()] for row in rows],
                "made": [[*key, draft.tokens.tolist()] for key, draft in ahead.drafts.items()],
                "store": [
                    [*key, d.tokens.tolist(), d.is_finished, d.version, d.holder]
                    for key, d in drafts.items()
                    if d
                ],
                "in_engine": [list(row.id) for row in world.engine.rows],
                "planned": [list(item.id) for item in planned],
                "ticks": record.num_ticks,
            }
        )
    return results


def play_as_process(ranks: Ranks, num_rollouts: int) -> list[dict]:
    return play_two_ranks(ranks, ProgressBoard(ranks, 120, interval_s=0), num_rollouts)


def play_in_virtual_time(num_rollouts: int) -> list[list[dict]]:
    """Both ranks in this process; only forwards and ticks take time."""
    time, results = VirtualTime(2), {}

    def work(rank: int) -> None:
        ranks = SimulatedRanks(time, rank)
        results[rank] = play_two_ranks(
            ranks, ProgressBoard(ranks, 120, SimulatedTicks(ranks), interval_s=0), num_rollouts
        )

    time.run(work)
    return [results[0], results[1]]


def pass_time(engine: Engine, ranks: SimulatedRanks) -> None:
    """From now on a forward takes virtual time."""
    step = engine.step

    def timed_step(*arguments) -> tuple[list[Row], Load]:
        finished, load = step(*arguments)
        ranks.clock.sleep(forward_seconds(load))
        return finished, load

    engine.step = timed_step


def check_shared_work(everyone: list[list[dict]]) -> tuple[int, int]:
    """What must hold however long anything takes. Returns how many drafts were made, and how many
    stayed in an engine."""
    model = new_model()
    wanted = {}
    for step in range(len(everyone[0]) + 2):
        wanted |= plain(model, step, FOUR_PROMPTS)[0]
    made, staying = 0, 0
    for step, both in enumerate(zip(*everyone, strict=True)):
        assert both[0]["store"] == both[1]["store"] and both[0]["ticks"] == both[1]["ticks"]
        assert both[0]["planned"] == both[1]["planned"]
        keys = [tuple(entry[:3]) for result in both for entry in result["made"]]
        assert len(keys) == len(set(keys))
        for result in both:
            for *key, tokens in result["rows"]:
                assert key[1] == step and tokens == wanted[tuple(key)][0]
            for *key, tokens in result["made"]:
                assert tokens == wanted[tuple(key)][0][: len(tokens)]
            made += len(result["made"])
        for *key, _, is_finished, _, holder in both[0]["store"]:
            if holder >= 0:
                staying += 1
                assert (
                    key in both[holder]["in_engine"]
                    and key not in both[1 - holder]["in_engine"]
                    and not is_finished
                )
    return made, staying


def test_two_ranks_share_the_work():
    """No draft is made twice, stores and plans are the same, one rank alone holds what stays, and
    own rows are exact."""
    everyone = play_in_virtual_time(4)
    made, staying = check_shared_work(everyone)
    by_rank = [sum(len(result["made"]) for result in results) for results in everyone]
    assert min(by_rank) > 4 and sum(by_rank) == made > 20 and staying > 3
    assert play_in_virtual_time(4) == everyone, "a function of the inputs alone"


def test_two_processes_share_the_work(tmp_path):
    """The same over gloo. How much is drafted, and by whom, is up to the machine."""
    check_shared_work(run_ranks(tmp_path, play_as_process, 2, 3))
