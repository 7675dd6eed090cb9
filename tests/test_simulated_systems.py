"""benchmarks/simulated_systems.py at its smallest size, and what it works out itself."""

import json
import sys

import numpy as np
import pytest

from benchmarks import simulated_systems
from benchmarks.shared import main
from benchmarks.simulated_systems import (
    CHANGED,
    CHANGES,
    SYSTEMS,
    Setting,
    System,
    scaled,
    simulate_run,
)
from bubblespec.config import config_of_sections
from bubblespec.simulate.__main__ import BLANK, nested
from bubblespec.simulate.cost import RATES, ForwardCost
from bubblespec.simulate.drafter import DrafterModel


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the benchmark with few ranks and responses; returns its exit code and what was
    simulated."""
    monkeypatch.setattr(simulated_systems, "RANKS", 2)
    monkeypatch.setattr(simulated_systems, "GENERATIONS", 2)
    simulated, original = [], simulate_run

    def note(setting: Setting, size: str, longest: int, system: System) -> dict:
        simulated.append((size, longest, system))
        return original(setting, size, longest, system)

    monkeypatch.setattr(simulated_systems, "simulate_run", note)

    def call(*options: str) -> tuple[int, list]:
        simulated.clear()
        small = [
            "--json",
            str(tmp_path / "out.json"),
            "--sizes",
            "7b",
            "--longest",
            "100",
            "--steps",
            "2",
            "--prompts",
            "4",
        ]
        monkeypatch.setattr(sys, "argv", ["simulated_systems.py", *small, *options])
        return main(simulated_systems.run, simulated_systems.make_parser()), list(simulated)

    return call


def test_every_system_is_compared_and_drawn(command, tmp_path, capsys):
    code, simulated = command("--lengths", "8k")
    assert code == 0 and len(simulated) == len(SYSTEMS) + 1, "and the plain run of two epochs"
    pictures = [str(tmp_path / name) for name in ("systems.png", "changes.png")]
    code, simulated = command(
        "--lengths", "8k,16k", "--picture", pictures[0], "--ablation", pictures[1]
    )
    assert code == 0 and len(simulated) == len(SYSTEMS) + 1 + len(CHANGES), "8k is there"
    assert {longest for _, longest, _ in simulated} == {16000}
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("systems.png", "changes.png"))
    report = json.loads((tmp_path / "out.json").read_text())
    runs = {(run["longest"], run["system"]): run for run in report["runs"]}
    assert len(runs) == len(report["runs"]) == 2 * (len(SYSTEMS) + 1) + len(CHANGES)
    for longest in (8000, 16000):
        assert (
            runs[longest, "plain"]["speedup"]
            == runs[longest, "plain, second epoch"]["speedup"]
            == 1.0
        )
        drafter, plain = runs[longest, "learned drafter"], runs[longest, "plain"]
        assert drafter["speedup"] == pytest.approx(
            plain["seconds_per_token"] / drafter["seconds_per_token"]
        )
        assert 1.5 < drafter["speedup"] < 2.5
        old, new = runs[longest, "plain, second epoch"], runs[longest, "drafts of the epoch before"]
        assert new["speedup"] == pytest.approx(old["seconds_per_token"] / new["seconds_per_token"])
        assert runs[longest, "all, 3 tokens a pass"]["speedup"] > 1.3, (
            "of two steps, neither of them a long round"
        )
        # Nothing is faster than its longest rows by themselves, after the first mismatch of drafts.
        assert all(
            run["longest_s"] < 1.05 * run["seconds"]
            for (length, _), run in runs.items()
            if length == longest
        )
    assert (
        runs[16000, f"{CHANGED}; without the drafter"]["speedup"] < runs[16000, CHANGED]["speedup"]
    )
    printed = capsys.readouterr().out
    assert "| learned drafter | " in printed and "TLT (2511.16665): 1.7x end to end" in printed
    assert "| without tail batching | " in printed


def test_a_file_of_other_settings_is_refused(command, tmp_path, capsys):
    for content, says in (
        ({"settings": {"steps": 4}, "runs": []}, "runs of another longest, steps, prompts"),
        ({}, "is no file of this"),
    ):
        (tmp_path / "out.json").write_text(json.dumps(content))
        assert command("--lengths", "8k") == (2, [])
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--lengths", "big"], "--lengths: 'big' is no number of tokens"),
        (["--sizes", "7b,70b"], "--sizes: 70b unknown"),
        (["--steps", "3"], "--steps: an even number"),
        (["--drafter", "tokens_a_pass=9"], "--drafter: tokens_a_pass: 9.0 must be from 1 to 6"),
    ],
)
def test_wrong_arguments_end_in_one_line(command, capsys, options, says):
    assert command(*options) == (2, [])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


@pytest.mark.parametrize("longest", [200, 400])
def test_a_scaled_run_takes_what_the_whole_one_does(monkeypatch, longest):
    """Plain steps of responses of up to 800 tokens, a simulated token for each, for two, and for
    four."""
    monkeypatch.setattr(simulated_systems, "RANKS", 2)
    whole, part = (
        simulate_run(Setting(n, 2, 8, 0, DrafterModel()), "7b", 800, SYSTEMS["plain"])["seconds"]
        for n in (800, longest)
    )
    assert part == pytest.approx(whole, rel=0.03)


def test_scaled_costs_count_positions_so_many_times():
    cost = ForwardCost(
        [1], [1e-4], 5e-3, dict.fromkeys(RATES, 0.0) | {"positions": 1e-7, "pairs": 1e-9}
    )
    for tokens, positions in ((8, 100), (32, 5000)):
        load, stands_for = (8, tokens, 0, positions, 0, 0), (8, tokens, 0, 16 * positions, 0, 0)
        assert scaled(cost, 16.0).seconds(load) == pytest.approx(cost.seconds(stands_for))


def test_a_row_alone_takes_the_best_chain():
    """10 ms a forward whatever is fed, 1 ms for each token of a chain that is right with chance 0.5
    at each place."""
    cost = ForwardCost([1], [0.0], 10e-3, dict.fromkeys(RATES, 0.0))
    tokens_a_pass = 1 + sum(0.5**n for n in range(1, 6))
    drafter = DrafterModel(tokens_a_pass, share=0.1)

    def alone_s(method: str) -> float:
        config = config_of_sections(
            nested(BLANK) | {"speculative": {"method": method}}, [], "the test"
        )
        return simulated_systems.alone_s(config, cost, drafter, 100)

    chains = [(10e-3 + n * 1e-3) / (1 + sum(0.5**i for i in range(1, n + 1))) for n in range(6)]
    assert np.argmin(chains) == 2
    assert alone_s("none") == chains[0] and alone_s("drafter") == pytest.approx(min(chains))
    assert alone_s("bubble+suffix") == 10e-3 / 2
