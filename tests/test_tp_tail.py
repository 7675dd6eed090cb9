"""The TP tail within a rollout, in virtual time, with rows of all lengths, drafts and stops: the
responses and the end of the loop are those without the tail."""

from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.config import Config
from bubblespec.draft.chains import DraftModelSource
from bubblespec.draft.proposer import PRIORS, Proposer, make_proposer
from bubblespec.draft.sources import DraftSource
from bubblespec.draft.store import TextStore
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import tap
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.mechanisms import Run
from bubblespec.mechanisms.drafter.eagle3 import Eagle3
from bubblespec.mechanisms.drafter.mechanism import DrafterRunner
from bubblespec.mechanisms.tp_tail import tail as tp_tail
from bubblespec.mechanisms.tp_tail.shards import ShardedForward, TPGroup
from bubblespec.mechanisms.tp_tail.tail import (
    ROWS,
    STOP_INTERVAL,
    OwnersPropose,
    TPTail,
    make,
)
from bubblespec.planner.costs import KNOTS, CostModel
from bubblespec.planner.lengths import LengthForecast
from bubblespec.planner.place import place_in_turn
from bubblespec.planner.stats import RunStats
from bubblespec.planner.survival import ALIGNED
from bubblespec.planner.windows import choose_windows
from bubblespec.rollout.board import ProgressSync, RankState
from bubblespec.rollout.table import RolloutProgress
from bubblespec.tools.simulate.world import SimulatedRanks, SimulatedTicks, World
from bubblespec.types import Draft
from tests.helpers.clocks import forward_seconds
from tests.helpers.generation import make_runner
from tests.helpers.models import VOCAB, random_model, small_config
from tests.helpers.proposals import draft
from tests.helpers.proposals import row as make_row
from tests.helpers.rollouts import (
    FOUR_PROMPTS,
    LIMIT,
    MAX_LENGTH,
    PARAMS,
    SEED,
    check_plain,
    fixed_cost,
    groups_of,
    new_model,
    pass_time,
    plain,
    plain_rows,
)
from tests.helpers.rows import launch_of, loop_over

NUM_ROWS = 12  # of four prompts, three responses each


class TimedRunner(DrafterRunner):
    def draw(self, *arguments):
        self.engine.clock.sleep(1e-4)
        return super().draw(*arguments)


def play(
    num_ranks, max_rows, *, drafts=None, has_drafter=False, stop_at=None, page_size=None
) -> list[dict]:
    """Run a rollout; return results by rank. drafts: tokens by sample; has_drafter: every forward
    of decoding rows verifies chains; stop_at: forward of the tail in which rank 1 gets a stop
    request."""
    world, results = World(num_ranks), {}

    def work(rank: int) -> None:
        ranks, model = SimulatedRanks(world, rank), new_model()
        engine = Engine(make_runner(model, 4, MAX_LENGTH, SEED, page_size=page_size))
        pass_time(engine, ranks)
        tp = TPGroup(ranks)
        shared = make_runner(model, NUM_ROWS, MAX_LENGTH, SEED, tp=tp, page_size=page_size)
        tail = TPTail(Engine(shared), ranks, tp.gather_array, max_rows)
        table = RolloutProgress(
            launch_of(groups_of(0, FOUR_PROMPTS), 3), place_in_turn(4, 3, num_ranks), rank
        )
        rows, finished, entered, num_chains = table.make_rows(LIMIT), [], [], []
        proposer = None
        if drafts is not None:
            parts = ["bubble", "suffix"], TextStore(1000), fixed_cost()
            proposer = make_proposer(*parts, has_drafts=True, clock=ranks.clock)
            proposer.begin()
            for row in rows.values():
                row.draft = Draft(drafts[row.id], False, 0)
                proposer.track(row, version=1)
        source = None
        if has_drafter:
            drafter = Eagle3(model, np.arange(VOCAB))
            tap(model, drafter.taps)
            engine.clock = tail.engine.clock = ranks.clock
            runner = TimedRunner(drafter, engine, PARAMS)
            costs = fixed_cost(), fixed_cost()
            source = DraftModelSource(
                "drafter", runner, *costs, prior=0.6, longest=3, always=True, clock=ranks.clock
            )
            together = TimedRunner(drafter, tail.engine, PARAMS)
            for own in (runner, together):
                own.enable(True)
            tail.followers.append(lambda engine: source.moved_to(together))
            proposer = Proposer([source], source.cost, always=True, clock=ranks.clock)
            proposer.begin()
            for row in rows.values():
                proposer.track(row, version=1)
        run, launch = tail.run, shared.launch

        def noted(loop):
            engine.collect()
            entered.append({place: len(row.tokens) for place, row in loop.unfinished.items()})
            before = 0 if source is None else int(source.chain_lengths[1:].sum())
            run(loop)
            num_chains.append(0 if source is None else int(source.chain_lengths[1:].sum()) - before)

        def watched(*arguments):
            if rank == 1 and stop_at is not None and tail.engine.num_forwards == stop_at:
                ranks.must_stop = True
            return launch(*arguments)

        tail.run, shared.launch = noted, watched
        board = ProgressSync(ranks, 120, SimulatedTicks(ranks), interval_s=0)
        parts = {"proposer": proposer, "board": board, "take_over": tail}
        loop = loop_over(engine, ranks, PARAMS, rows, table, on_finished=finished.append, **parts)
        record = loop.run()
        found = {"rows": rows, "finished": finished, "entered": entered, "record": record}
        results[rank] = found | {"board": board, "chains": num_chains}
        assert engine.is_idle and tail.engine.is_idle
        assert source is None or source.runner.engine is engine, "as in the next rollout"

    world.run(work)
    return [results[rank] for rank in range(num_ranks)]


def had_stop_request(result: dict) -> bool:
    return any(state.must_stop for state in result["board"].last_states)


def num_shared(result: dict) -> int:
    return len(result["record"].shared_forwards)


def check(ranks: list[dict]) -> None:
    check_plain([list(result["rows"].values()) for result in ranks])
    for result in ranks:
        assert sorted(map(id, result["finished"])) == sorted(
            id(row) for row in result["rows"].values()
        )


@pytest.mark.parametrize(
    "num_ranks, max_rows, page_size, can_move",
    [
        *((n, m, None, True) for n, m in ((2, 1), (3, 12), (4, 7))),
        (3, 7, 5, True),
        (3, 7, None, False),
    ],
)
def test_responses_equal_without_tail(monkeypatch, num_ranks, max_rows, page_size, can_move):
    """Keys and values move to the tail, from pages to pages too; where one rank cannot move them,
    tokens of all rows are fed again."""
    if not can_move:
        cannot = iter([False])
        monkeypatch.setattr(tp_tail, "can_transfer_kv", lambda *runners: next(cannot, True))
    ranks = play(num_ranks, max_rows, page_size=page_size)
    check(ranks)
    entered = [result["entered"] for result in ranks]
    assert {len(times) for times in entered} == {1}, "all ranks enter the tail together, and once"
    lengths = [length for (rows,) in entered for length in rows.values()]
    assert 0 < len(lengths) <= max_rows and (max_rows == 12 or max(lengths) > 0)
    assert len({num_shared(result) for result in ranks}) == 1
    assert [result["record"].extras[ROWS] for result in ranks] == [len(rows) for (rows,) in entered]
    for result in ranks:
        first = result["record"].shared_forwards[0]
        if not can_move:
            assert first.load.tokens > 2 * first.load.rows and first.load.prompt_tokens > 0
        elif max_rows < 12:  # all rows have decoded
            assert first.load.rows == first.load.tokens == len(lengths)
        (span,) = result["record"].shared
        assert span in result["record"].spans and span.end_s > span.begin_s
        assert result["board"].is_over and not had_stop_request(result)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_drafts_of_owners_shorten_the_tail(num_ranks):
    """Stored drafts that are right up to some token; and chains of a learned drafter, drafted for
    own rows in every forward after those that feed tokens again."""
    wanted = {row.id: row.tokens.astype(np.int32).copy() for row in plain_rows()}
    for number, tokens in enumerate(wanted.values()):
        tokens[24 + number :] += 1
    plainly = num_shared(play(num_ranks, 12)[0])
    drafted = play(num_ranks, 12, drafts=wanted)
    chained = play(num_ranks, 12, has_drafter=True)
    assert num_shared(drafted[0]) < 0.8 * plainly and num_shared(chained[0]) < plainly
    for ranks in (drafted, chained):
        check(ranks)
        counts = [result["record"].acceptance for result in ranks if result["rows"]]
        assert all(count.accepted_tokens > 0 for count in counts)
    counts = [result["record"].acceptance for result in drafted]
    gained = sum(count.gained_tokens for count in counts)
    assert gained == sum(len(tokens) for tokens in wanted.values()), "each row counts once"
    assert all((result["chains"][0] > 3) == bool(result["rows"]) for result in chained)


@pytest.mark.parametrize("stop_at", [0, 5])
def test_all_ranks_leave_the_tail_on_a_stop_request(stop_at):
    ranks = play(3, 12, stop_at=stop_at)
    wanted, _ = plain(new_model(), 0, FOUR_PROMPTS, 3)
    for result in ranks:
        assert result["board"].is_over and had_stop_request(result)
        assert len(result["entered"]) == 1, "no rank enters the tail again"
        assert num_shared(result) <= stop_at + STOP_INTERVAL
        for row in result["rows"].values():
            assert len(row.tokens) > 0
            assert row.tokens.tolist() == wanted[row.id][0][: len(row.tokens)]


def test_forwards_wait_for_results_where_any_source_needs_them():
    """On all ranks alike, so whether a source is used on this one does not matter; but not where it
    proposes for another engine, as the copy does."""
    for needs_results, serves in ((False, True), (True, True), (True, False)):
        source = DraftSource()
        source.needs_results, source.serves = needs_results, lambda engine, serves=serves: serves
        proposer = Proposer([source], CostModel())
        is_waiting = needs_results and serves
        assert OwnersPropose(proposer, (), None, None, None).needs_results == is_waiting
        source.is_enabled = False
        assert not proposer.needs_results
        assert OwnersPropose(proposer, (), None, None, None).needs_results == is_waiting


@pytest.mark.parametrize("is_measured", [True, False])
def test_windows_of_all_ranks_are_planned_together(is_measured):
    """One forward verifies the drafts of all. Alone each rank would fill its rows' windows."""
    rows = [make_row(number) for number in range(8)]
    for row in rows:
        row.draft = draft(range(64))
    cost = fixed_cost(a=1.0, b=0.0, c=0.02) if is_measured else None
    alone = [fixed_cost(a=1.0, b=0.0, c=c) for c in (0.03, 0.001)]  # measured by each rank
    found, world = {}, World(2)

    def propose(rank: int) -> None:
        proposer = make_proposer(("bubble",), TextStore(1000), alone[rank], has_drafts=True)
        proposer.begin()
        own = rows[4 * rank : 4 * rank + 4]
        for row in own:
            proposer.track(row, 4)
        gather, numbers = SimulatedRanks(world, rank).all_gather, {row.number for row in own}
        drafts = OwnersPropose(proposer, numbers, gather, None, cost)
        found[rank] = drafts.propose(rows, np.ones(8, int), np.full(8, 50), 999, np.zeros(8, int))

    world.run(propose)
    (tokens, counts), again = found[0], found[1]
    assert tokens.tolist() == again[0].tolist() and counts.tolist() == again[1].tolist()
    chance, positions = np.full(8, PRIORS[ALIGNED]), 8 * (1 + len(rows[0].prompt))
    planned_by = cost or alone[0]
    wanted = choose_windows(chance, np.full(8, 50), planned_by, positions, budget=999)
    assert counts.tolist() == wanted.tolist() and 0 < wanted.sum() < 8 * 50
    assert tokens.tolist() == [token for count in wanted for token in range(count)]


def test_tail_is_due_with_few_rows_all_trained_on():
    launch = launch_of(groups_of(0, FOUR_PROMPTS), 3)
    table, states = RolloutProgress(launch, place_in_turn(4, 3, 2), 0), [RankState(2), RankState(0)]
    tail = TPTail(Engine(ModelRunner(new_model(), 4, MAX_LENGTH, SEED)), None, None, 3)
    table.synced[:] = -1
    assert not tail.is_due(table, states), "nothing is left"
    table.synced[2:5] = 7
    assert tail.is_due(table, states)
    assert not tail.is_due(table, [RankState(2, must_stop=True), RankState(0)])
    table.synced[5] = 0
    assert not tail.is_due(table, states), "too many rows"
    table.synced[5] = -1
    selecting = RolloutProgress(launch._replace(num_trained=3), place_in_turn(4, 3, 2), 0)
    selecting.synced[:] = table.synced
    assert not tail.is_due(selecting, states), "some are not trained on"
    tail.cost, tail.sampler = CostModel(), SimpleNamespace(stats=RunStats(), board=object())
    assert not tail.is_due(table, states), "nothing is known of the costs of one rank"


# Set-up


def set_up_tail(rows, slowdown: float, name: str = "llama") -> list:
    """Make the tail of two ranks whose shared forwards take `slowdown` times those of one rank."""
    world, found = World(2, meeting_s=1e-6), [None, None]
    config = Config()
    config.rollout.tp_tail_max_rows, config.rollout.max_completion_length = rows, LIMIT

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        model = random_model(small_config(name))
        prepare_model(model, MAX_LENGTH)
        engine = Engine(ModelRunner(model, 4, MAX_LENGTH, SEED))
        pass_time(engine, ranks)
        board = ProgressSync(ranks, 120, SimulatedTicks(ranks), interval_s=5e-3)
        stats = RunStats(shared_cost=CostModel.from_parameters(FORWARDS))
        parts = {"config": config, "ranks": ranks, "engine": engine, "params": PARAMS}
        sampler = SimpleNamespace(**parts, board=board, stats=stats)
        run = Run(config, ranks, num_shared_rows=16 if rows == "auto" else rows)
        run.sampler = sampler
        found[rank] = make(run)
        if found[rank] is not None:
            assert (found[rank].cost is not None) == (rows == "auto")

    launch = ModelRunner.launch

    def timed(runner, batch, params):
        if isinstance(runner.forward, ShardedForward):
            runner.forward.tp.ranks.clock.sleep(slowdown * forward_seconds(batch.load))
        return launch(runner, batch, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "launch", timed)
        world.run(work)
    return found


FORWARDS = np.array([5e-3, 1e-4, 5e-5, 1e-4, 1e-7, *np.zeros(len(KNOTS))])  # as `forward_seconds`


@pytest.mark.parametrize(
    "rows, slowdown, is_there",
    [("auto", 0.3, True), ("auto", 1.0, False), (8, 30.0, True), (0, 0.1, False)],
)
def test_auto_decides_by_measured_forwards(rows, slowdown, is_there):
    tails = set_up_tail(rows, slowdown)
    assert [tail is not None for tail in tails] == [is_there] * 2
    if is_there:
        assert tails[0].engine.is_idle and tails[0].max_rows == (16 if rows == "auto" else rows)
        has_memory = tails[0].engine.runner.cache.num_bytes() > 0
        assert has_memory == (rows == "auto"), "what was made for measuring stays"
        for tail in tails:
            (free,) = tail.ranks.before_end
            free()
        assert tails[0].engine.runner.cache.num_bytes() == 0


def test_auto_enters_a_profitable_tail():
    """Two rows, each of which needs 30 tokens more, one on each rank: 30 forwards alone, 30 at a
    third of the time together."""
    tail, _ = set_up_tail("auto", 0.3)
    launch, states = launch_of(groups_of(0, FOUR_PROMPTS), 3), [RankState(1), RankState(1)]
    zeros = np.zeros(12)
    expected = LengthForecast(
        np.full(12, 9), np.repeat(np.arange(4), 3), zeros + 35.0, zeros, zeros, zeros
    )
    table = RolloutProgress(launch, place_in_turn(4, 3, 2), 0, expected)
    table.synced[:] = -1
    table.synced[[0, 3]] = 5
    assert tail.is_due(table, states)
    table.synced[[0, 3]] = 34  # the last token: not worth two ticks
    assert not tail.is_due(table, states)
    table.synced[[0, 3]], table.rows = 5, None
    assert not tail.is_due(table, states), "lengths are unknown"


def test_uncuttable_model_is_named_once(capfd):
    assert set_up_tail(8, 0.1, "gpt2") == [None, None]
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines == [
        "warning: no TP tail: GPT2LMHeadModel is not built like Llama "
        "(rollout.tp_tail_max_rows=0 tries nothing else)"
    ]
    assert set_up_tail("auto", 0.1, "gpt2") == [None, None] and not capfd.readouterr().err
