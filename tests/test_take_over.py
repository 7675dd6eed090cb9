"""Rows that change ranks within a rollout, in virtual time: whatever moves when, the responses are
those of plain generation, and each is on one rank. Moves are drawn at random from what a tick has
told, far more of them than would pay."""

import numpy as np
import pytest
from test_rollout_loop import (
    FOUR_PROMPTS,
    LIMIT,
    MAX_LENGTH,
    PARAMS,
    SEED,
    check_plain,
    groups_of,
    new_model,
    pass_time,
)

from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.idle.work import Offer
from bubblespec.rollout.board import ProgressBoard
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.moves import MAX_MOVES, Move
from bubblespec.rollout.placement import place_in_turn
from bubblespec.rollout.standing import Standing
from bubblespec.rollout.take_over import TakeOver
from bubblespec.simulate.world import SimulatedRanks, SimulatedTicks, World
from tests.helpers.rows import launch_of


class TakeAnyTime(TakeOver):
    """Rows come to ranks that have rows of their own as well."""

    def offers(self, states) -> list[Offer]:
        return [offer._replace(beside_rows=True) for offer in super().offers(states)]

    def wanted(self) -> int:
        return MAX_MOVES


class Moves:
    """Any rows, from their rank to any other; the same on all ranks."""

    def __init__(self, chance: float):
        self.random, self.chance, self.num = np.random.default_rng(3), chance, 0

    def plan(self, standing: Standing, states) -> list[Move]:
        places = np.flatnonzero(standing.told >= 0)
        drawn = places[self.random.random(len(places)) < self.chance]
        targets = (standing.owners[drawn] + self.random.integers(1, len(states), len(drawn))) % len(
            states
        )
        self.num += len(drawn)
        return [
            Move(row, int(standing.owners[row]), target, saves_s=1.0, costs_s=1.0)
            for row, target in zip(drawn.tolist(), targets.tolist(), strict=True)
        ]


def play(num_ranks: int, num_slots: int, chance: float, max_batch_tokens: int = 256) -> list[dict]:
    """A rollout of four prompts with three responses each; what each rank has made of it."""
    world, results = World(num_ranks), {}

    def work(rank: int) -> None:
        ranks = SimulatedRanks(world, rank)
        engine = Engine(
            ModelRunner(new_model(), num_slots, MAX_LENGTH, SEED, max_batch_tokens=max_batch_tokens)
        )
        pass_time(engine, ranks)
        launch = launch_of(groups_of(0, FOUR_PROMPTS), 3)
        standing = Standing(launch, place_in_turn(4, 3, num_ranks), rank)
        rows, moves, told, taken = standing.make_rows(LIMIT), Moves(chance), [], []
        take_over = TakeAnyTime(
            standing, moves.plan, LIMIT, lambda row: taken.append(len(row.tokens))
        )
        board = ProgressBoard(ranks, 120, SimulatedTicks(ranks), interval_s=0)
        loop = RolloutLoop(
            engine, ranks, PARAMS, board=board, works=[take_over], on_finished=told.append
        )
        record = loop.run(rows, standing)
        assert engine.is_idle
        results[rank] = {
            "rows": rows,
            "owners": standing.owners,
            "told": told,
            "taken": taken,
            "record": record,
            "num_moves": moves.num,
        }

    world.run(work)
    return [results[rank] for rank in range(num_ranks)]


@pytest.mark.parametrize(
    "num_ranks, num_slots, chance", [(2, 24, 0.2), (2, 2, 0.1), (3, 2, 0.3), (4, 24, 0.5)]
)
def test_any_moves_leave_the_responses_as_they_are(num_ranks, num_slots, chance):
    ranks = play(num_ranks, num_slots, chance)
    check_plain([list(result["rows"].values()) for result in ranks])
    for rank, result in enumerate(ranks):
        assert (result["owners"] == ranks[0]["owners"]).all()
        assert sorted(result["rows"]) == np.flatnonzero(result["owners"] == rank).tolist()
        assert {id(row) for row in result["told"]} == {id(row) for row in result["rows"].values()}
        assert len(result["told"]) == len(result["rows"]) and result["record"].taken_rows == len(
            result["taken"]
        )
    num_taken, num_moves = sum(len(result["taken"]) for result in ranks), ranks[0]["num_moves"]
    assert 0 < num_taken < num_moves, "some had ended before they could go"
    assert any(length > 0 for result in ranks for length in result["taken"]), "some were in flight"
