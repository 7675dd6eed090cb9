"""Rollouts of one rank from step to step, on a small model, against generation without drafts.

The other rank is played by `BoardWithSlowRank`, so that idle time is as long as a test wants it.
"""

from types import SimpleNamespace

import numpy as np
import torch
import transformers

from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.proposer import Proposer, make_proposer
from bubblespec.draft.store import TextStore
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.planner.costs import KNOTS, CostModel
from bubblespec.planner.drafts import DraftRequest
from bubblespec.planner.survival import ALIGNED, TRIED
from bubblespec.records import RolloutRecord
from bubblespec.rollout.board import ProgressSync, RankState
from bubblespec.rollout.drafting import DraftAhead
from bubblespec.tools.simulate.world import SimulatedRanks
from bubblespec.types import Draft, Group, Load, Prompt, Row, SampleId
from tests.helpers.clocks import Clock, forward_seconds
from tests.helpers.models import VOCAB, small_config
from tests.helpers.rows import loop_of, make_rows, numbered

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
    """Costs that no measurement changes; by default drafts are next to free."""
    cost = CostModel.from_parameters(np.array([a, b, c, 0.0, 0.0, *np.zeros(len(KNOTS))]))
    cost.fit = lambda: None
    return cost


def as_dict(rows: list[Row]) -> dict:
    return {row.id: (row.tokens.tolist(), row.finish) for row in rows}


def plain(
    model, step: int, prompts=PROMPTS, num_generations: int = 2, limit: int = LIMIT
) -> tuple[dict, int]:
    """What plain generation gives for a step with the present weights, in how many forwards."""
    engine = Engine(ModelRunner(model, 64, MAX_LENGTH, SEED))
    return as_dict(
        engine.run(rows_of(step, prompts, num_generations, limit), PARAMS)
    ), engine.num_forwards


def check_plain(ranks_rows: list[list[Row]]) -> None:
    """The rows of all ranks are those of `plain_rows`, each once, log-probabilities alike."""
    wanted, found = (
        {row.id: row for row in plain_rows()},
        [row for rows in ranks_rows for row in rows],
    )
    assert len(found) == len(wanted) and as_dict(found) == as_dict(list(wanted.values()))
    for row in found:
        np.testing.assert_allclose(row.logprob, wanted[row.id].logprob, atol=1e-6)


def plain_rows() -> list[Row]:
    return Engine(ModelRunner(new_model(), 64, MAX_LENGTH, SEED)).run(
        rows_of(0, FOUR_PROMPTS, 3), PARAMS
    )


def pass_time(engine: Engine, ranks: SimulatedRanks) -> None:
    step = engine.step

    def timed_step(*arguments) -> tuple[list[Row], Load]:
        finished, load = step(*arguments)
        ranks.clock.sleep(forward_seconds(load))
        return finished, load

    engine.step = timed_step


def one_rank() -> ProgressSync:
    ranks = Ranks(torch.device("cpu"))
    ranks.clock = Clock()
    return ProgressSync(ranks, timeout_s=100, interval_s=0)


class BoardWithSlowRank:
    """The board as rank 0 of two sees it; rank 1 is done after `num_ticks` ticks. A tick is
    complete between any two forwards, or, with a `lag`, only so many polls later."""

    def __init__(self, num_ticks: int, lag: int = 0):
        self.ranks = SimpleNamespace(rank=0, world_size=2, must_stop=False, clock=Clock())
        self.ranks.device = torch.device("cpu")
        self.last_tick, self.lag = num_ticks, lag

    def begin(self) -> None:
        self.num_ticks, self.num_polls, self.is_over, self.are_others_done = 0, 0, False, False

    def poll(self, state, is_done: bool = False) -> list[RankState] | None:
        self.num_polls += 1
        return None if self.num_polls % (self.lag + 2) else self.wait(state)

    def wait(self, state) -> list[RankState] | None:
        if self.is_over:
            return None
        own = state()
        self.num_ticks += 1
        self.are_others_done = self.num_ticks >= self.last_tick
        self.is_over = own.is_done and self.are_others_done
        nothing = np.zeros_like(own.facts)
        return [own, RankState(int(not self.are_others_done), facts=nothing)]


def tried_ages(proposer: Proposer) -> set[int]:
    """Ages of the aligned drafts of which tokens were verified in this rollout."""
    survival = proposer.survival
    tried = survival.counts[TRIED].sum(axis=0)
    return {
        kind[1]
        for kind, count in zip(survival.kinds, tried, strict=True)
        if count and kind[0] == ALIGNED
    }


class World:
    def __init__(self, model, num_slots: int, board, method="bubble+suffix"):
        self.board, clock = board, board.ranks.clock
        self.proposer = make_proposer(
            method.split("+"), TextStore(10**6), fixed_cost(), has_drafts=True, clock=clock
        )
        runner = ModelRunner(model, num_slots, MAX_LENGTH, SEED, max_num_batched_tokens=256)
        self.engine, self.store = Engine(runner), TextStore(10**6)

    def plans(self, coming, prompts=PROMPTS, num_generations: int = 2) -> list[DraftRequest]:
        """All that is left to draft of some coming steps, in order."""
        plans = []
        for group in (group for draw_index in coming for group in groups_of(draw_index, prompts)):
            for sample in map(group.sample, range(num_generations)):
                draft = self.store.get(sample)
                if draft is None or not draft.is_finished:
                    plans.append(
                        DraftRequest(sample, 1.0, 1.0, True, prompt=group.prompt.token_ids)
                    )
        return plans

    def rollout(
        self, step, rows, plans, drafts=None, limit=LIMIT, max_slowdown=1.0
    ) -> tuple[RolloutRecord, dict[SampleId, Draft]]:
        """Drafts ahead unless `plans` is None. Returns also the drafts that were made."""
        self.proposer.begin()
        for row in numbered(rows).values():
            draft = drafts[row.id] if drafts and row.id in drafts else self.store.get(row.id)
            row.draft = draft
            self.proposer.track(row, step)
        ahead = None
        if plans is not None:
            options = {"version": step, "max_new_tokens": limit, "max_slowdown": max_slowdown}
            parts = (plans, self.store, self.proposer, self.proposer.cost)
            ahead = DraftAhead(*parts, **options)
        own, step_engine, forwards = {id(row) for row in rows}, self.engine.step, []

        def noted_step(*arguments) -> tuple[list[Row], Load]:
            num_ahead = sum(id(row) not in own for row in [*self.engine.rows, *self.engine.queue])
            num_own = len(self.engine.rows) + len(self.engine.queue) - num_ahead
            forwards.append((num_own, num_ahead))
            return step_engine(*arguments)

        self.engine.step = noted_step
        parts = {"proposer": self.proposer, "board": self.board, "idle_drafts": ahead}
        record = loop_of(self.engine, self.board.ranks, PARAMS, rows, **parts).run()
        del self.engine.step
        assert [(each.own_rows, each.ahead_rows) for each in record.forwards] == forwards
        self.store.drop(row.id for row in rows)
        if ahead is None:
            return record, {}
        ahead.finish(ALONE)
        return record, ahead.drafts


def made_up(wanted: dict, seed: int) -> dict:
    """Drafts right, wrong, cut, overlong and empty, and rows without one, by turns."""
    rng, drafts = np.random.default_rng(seed), {}
    for number, (key, (tokens, _)) in enumerate(wanted.items()):
        noise = rng.integers(1, VOCAB, 60).tolist()
        kinds = [tokens, noise, tokens[: len(tokens) // 2], tokens + noise, [], None]
        kind = kinds[(number + seed) % len(kinds)]
        drafts[key] = None if kind is None else Draft(np.array(kind, np.int32), number % 2 == 0, 0)
    return drafts
