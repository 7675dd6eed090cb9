"""The shared tail in virtual time: what its forwards take, by hand; the same tokens, sooner where
all-reduces are fast."""

import json

import pytest
from test_simulate_tail_batching import make_config, make_workload

from bubblespec.records import Load
from bubblespec.simulate import __main__
from bubblespec.simulate.cost import RATES, ForwardCost
from bubblespec.simulate.run import simulate
from bubblespec.simulate.shared import SharedCost, SharedModel

# 10 ms for a forward, of which 2 are launches; tokens are nearly free.
COST = ForwardCost([1], [1e-6], 10e-3, dict.fromkeys(RATES, 0.0))
FAST = SharedModel(all_reduce_us=10.0, layers=10, launch_ms=2.0, exchange_us=50.0)
SLOW = SharedModel(all_reduce_us=1000.0, layers=10, launch_ms=2.0)


def test_seconds_by_hand():
    load = Load(3, 3, 0, 60, 0, 0)
    assert COST.seconds(load) == pytest.approx(10e-3 + 2e-6)
    assert SharedCost(COST, FAST, 4).seconds(load) == pytest.approx(
        2e-3 + 20 * 10e-6 + (8e-3 + 2e-6) / 4
    )
    assert SharedCost(COST, FAST, 1).seconds(load) == pytest.approx(COST.seconds(load) + 20 * 10e-6)
    assert SharedCost(COST, SharedModel(launch_ms=50.0, layers=0), 4).seconds(
        load
    ) == pytest.approx(50e-3)


def played(
    method: str, rows: int | str, model: SharedModel | None, tail: bool = False
) -> tuple[float, list[str], int]:
    """Seconds, digests and forwards before the tail, of all steps on four ranks."""
    config, workload = make_config(method, tail), make_workload(steps=4)
    config.rollout.tp_tail_max_rows, workload.shared = rows, model
    steps = simulate(config, workload, COST, 4)
    return (
        sum(step.seconds for step in steps),
        [step.digest for step in steps],
        sum(step.forwards for step in steps),
    )


@pytest.mark.parametrize(
    "method, tail", [("none", False), ("bubble+suffix", False), ("suffix", True)]
)
def test_a_fast_exchange_shortens_the_tail_and_a_slow_one_is_not_used(method, tail):
    without, digests, forwards = played(method, 8, None, tail)
    always = played(method, 8, FAST, tail)
    assert always[1] == digests and always[0] < 0.95 * without and always[2] < forwards
    auto = played(method, "auto", FAST, tail)
    assert auto[1] == digests and auto[0] < 0.97 * without
    slow, slow_auto = played(method, 8, SLOW, tail), played(method, "auto", SLOW, tail)
    assert slow[1] == slow_auto[1] == digests
    assert slow[0] > 1.05 * without and slow_auto[0] < 1.02 * without


def test_the_same_run_takes_the_same_time():
    assert played("bubble+suffix", "auto", FAST) == played("bubble+suffix", "auto", FAST)


def test_the_command_line(tmp_path, monkeypatch, capsys):
    COST.save(str(tmp_path / "cost.json"))
    command = f"--synthetic mean=40,max=400,prompt=8,steps=2 --ranks 4 --cost-model {tmp_path}/cost.json rollout.placement=in_turn"
    options = "rollout.num_prompts_per_step=8 rollout.num_generations=3 speculative.method=none rollout.tp_tail_max_rows=6"
    argv = ["simulate", *command.split(), *options.split(), "--json", str(tmp_path / "out.json")]

    def call(*more: str) -> int:
        monkeypatch.setattr("sys.argv", [*argv, *more])
        return __main__.main()

    assert call("--shared-tail", "all_reduce_us=10,layers=10,launch_ms=2") == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["shared_tail"]["all_reduce_us"] == 10 and report["methods"].keys() == {
        "none",
        "shared",
    }
    seconds = [report["methods"][name]["total"]["seconds"] for name in ("none", "shared")]
    assert seconds[1] < seconds[0] and "shared" in capsys.readouterr().out
    (tmp_path / "out.json").unlink()
    assert call("--shared-tail", "layers=-1") == 2
    assert capsys.readouterr().err.strip().endswith("layers: -1 must be at least 0")
