"""Start-up with the real profile, which other tests replace (helpers/quick.py): forwards take
virtual seconds, and the profile finds what they cost."""

import re
import time

import pytest

from bubblespec.config.file import load_config
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.model_checks import prepare_model
from bubblespec.planner.costs import CostModel
from bubblespec.rollout import make_sampler
from bubblespec.rollout import profile as profile_module
from bubblespec.rollout.profile import profile
from bubblespec.setup import build
from bubblespec.types import Load
from tests.helpers.clocks import forward_seconds, virtual_time
from tests.helpers.generation import make_engine
from tests.helpers.models import random_model, small_config
from tests.helpers.runs import SHORT

PARAMS = SamplingParams()
LOADS = [
    Load(rows=1, tokens=1, positions=20),
    Load(rows=16, tokens=16, positions=16 * 60),
    Load(rows=8, tokens=8 * 4, wide_rows=8, positions=8 * 30),
]


def test_profile_ends_within_its_limit(monkeypatch):
    model = random_model(small_config("llama"))
    prepare_model(model, 100)
    engine = make_engine(model, 16, max_length=100)

    def run(limit_s: float, line_s: float) -> tuple[float, int, list[str]]:
        lines, loads, anchor = [], [], CostModel.anchor
        monkeypatch.setattr(profile_module, "LIMIT_S", limit_s)
        monkeypatch.setattr(profile_module, "LINE_S", line_s)
        with virtual_time() as ranks, pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                CostModel,
                "anchor",
                lambda cost, load, s: loads.append(load) or anchor(cost, load, s),
            )
            began_s = ranks.clock.perf_counter()
            cost = CostModel()
            profile(engine, PARAMS, cost, clock=ranks.clock, show=lines.append)
            return ranks.clock.perf_counter() - began_s, len(loads), lines

    whole_s, num_all, lines = run(1e9, 1e9)
    assert lines == [] and engine.is_idle
    short_s, num_timed, lines = run(whole_s / 2, whole_s / 8)
    assert 0.6 * whole_s / 2 < short_s < 1.1 * whole_s / 2
    assert num_all / 4 < num_timed < num_all
    *progress, end = lines
    assert 2 <= len(progress) <= 4, "one at most for each eighth"
    for line in progress:
        assert re.fullmatch(r"timing the engine: \d+ of \d+ parts, about \d s left", line)
    assert re.fullmatch(r"timing the engine: left out \d+ of \d+ parts, which take .*", end)


def test_ranks_that_share_forwards_leave_out_the_same_kinds():
    """Whatever each one's clock says: what one has no time for, none runs."""
    model = random_model(small_config("llama"))
    prepare_model(model, 100)
    engine, asked, loads = make_engine(model, 16, max_length=100), [], []
    cost = CostModel()
    cost.anchor = lambda load, seconds: loads.append((load.rows, load.tokens))
    kinds = list(profile_module._kinds(engine))
    options = {"clock": time, "any_rank": lambda is_so: (asked.append(is_so), len(asked) > 3)[1]}
    profile(engine, PARAMS, cost, **options)
    assert asked == [False] * (len(kinds) - 1)
    assert set(loads) == {(rows, rows * (1 + window)) for _, rows, window in kinds[:4]}


def test_profile_finds_cost_of_forwards(monkeypatch, tmp_path):
    costs, loads = [], []

    def noted(engine, params, cost, **options):
        costs.append(cost)
        profile(engine, params, cost, **options)

    anchor = CostModel.anchor
    monkeypatch.setattr(make_sampler, "profile", noted)
    monkeypatch.setattr(
        CostModel, "anchor", lambda cost, load, s: loads.append(load) or anchor(cost, load, s)
    )
    options = [*SHORT, "rollout.max_num_seqs=16", f"run.output_dir={tmp_path}"]
    with virtual_time() as ranks:
        trainer = build(load_config("configs/tiny_cpu_bulk.yaml", options), ranks)
    trainer.lock.close()
    assert costs == [trainer.sampler.stats.cost] and trainer.sampler.engine.is_idle
    kinds = {(load.rows, load.tokens) for load in loads}
    assert {1, 4, 16} == {rows for rows, _ in kinds}, "few and many rows"
    assert {(1, 1), (1, 16), (16, 16), (16, 64)} <= kinds, "short and long drafts"
    for load in LOADS:
        numbers = (load.rows, load.tokens, load.wide_rows, load.positions)
        assert costs[0].seconds(*numbers) == pytest.approx(forward_seconds(load), rel=0.15)
