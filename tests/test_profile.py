"""Start-up with the real profile, which other tests replace (helpers/quick.py): forwards take
virtual seconds, and the profile finds what they cost."""

import pytest

from bubblespec.config.file import load_config
from bubblespec.planner.costs import CostModel
from bubblespec.rollout import make_sampler
from bubblespec.rollout.profile import profile
from bubblespec.setup import build
from bubblespec.types import Load
from tests.helpers.clocks import forward_seconds, virtual_time
from tests.helpers.runs import SHORT

LOADS = [
    Load(rows=1, tokens=1, positions=20),
    Load(rows=16, tokens=16, positions=16 * 60),
    Load(rows=8, tokens=8 * 4, wide_rows=8, positions=8 * 30),
]


def test_profile_finds_cost_of_forwards(monkeypatch, tmp_path):
    costs, loads = [], []

    def noted(engine, params, cost, *, clock):
        costs.append(cost)
        profile(engine, params, cost, clock=clock)

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
