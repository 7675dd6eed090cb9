"""Readers of runs for the notebooks, against hand-worked values."""

import json
import os

import numpy as np
import pytest

from bubblespec.config.file import config_to_yaml, load_config
from bubblespec.errors import InputError
from bubblespec.telemetry.timeline import KINDS, trace
from notebooks import reading
from notebooks.reading import compare, read_run, read_runs, read_timeline, timeline_steps


def line(step: int, seconds: float, **changed) -> dict:
    """Return a step that generates for `seconds`, waits for 1 s and trains for 2 s."""
    found = {"step": step, "reward": 0.5, "rollout/digest": f"digest {step}"}
    found |= {"completions/mean_length": 3.0, "timing_s/gen": seconds, "timing_s/bubble": 1.0}
    found |= {"timing_s/train": 2.0, "timing_s/step": seconds + 3.0}
    return found | changed


def make_run(folder, lines: list, *overrides: str) -> str:
    """Write a run's folder; lines that are text are written as they are."""
    os.makedirs(folder)
    keys = ["rollout.num_prompts_per_step=2", "rollout.num_generations=4", *overrides]
    config = load_config("configs/tiny_cpu.yaml", keys)
    (folder / "config.yaml").write_text(config_to_yaml(config))
    text = [entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in lines]
    (folder / "metrics.jsonl").write_text("".join(text))
    return str(folder)


NONE, SUFFIX = "speculative.method=none", "speculative.method=suffix"


def test_runs_are_compared_over_common_steps(tmp_path):
    make_run(tmp_path / "z", [line(s, 9.0, **{"rollout/forwards": 100}) for s in range(4)], NONE)
    spec = {"timing_s/exchange": 0.5, "rollout/forwards": 50}
    spec |= {"rollout/spec_accepted_tokens": 30, "rollout/spec_wasted_tokens": 10}
    lines = [line(1, 3.5, **spec), line(2, 0.5, **spec, reward=None), line(3, 18.5, **spec)]
    lines.append(line(4, 1.0))
    lines[2]["rollout/digest"] = "another"
    make_run(tmp_path / "a", lines, SUFFIX)
    plain, other = read_runs(str(tmp_path))
    # The run without speculation comes first.
    assert (plain.name, other.name, other.method) == ("z", "a", "suffix")
    assert other.rollout_s.tolist() == [5.0, 2.0, 20.0, 2.0]
    found = compare(other, plain)
    assert found.num_steps == 3 and found.num_same == 2 and found.first_difference == 3
    assert found.tokens == "differ from step 3 on (2 of 3 the same)"
    assert found.rollout_speedup == pytest.approx(30 / 27)
    assert found.median_speedup == 2.0  # of 2, 5 and 0.5
    assert found.step_speedup == pytest.approx(36 / (6.5 + 3.5 + 21.5)) and found.forwards == -0.5
    assert reading.accepted_share(other) == pytest.approx(0.75) and np.isnan(
        reading.accepted_share(plain)
    )
    assert np.isnan(other.column("reward")).tolist() == [False, True, False, False]
    assert reading.num_response_tokens(plain).tolist() == [24.0] * 4  # 3 tokens x 2 prompts x 4
    assert compare(plain, plain).tokens == "the same in all 4 steps"


def test_timelines_round_trip(tmp_path):
    run = read_run(make_run(tmp_path / "a", [line(0, 1.0)]))
    assert timeline_steps(run) == []
    decode, wait, train = (KINDS.index(kind) for kind in ("decode", "wait", "train"))
    lanes = [
        np.array([(decode, 0.0, 1.5), (wait, 1.5, 2.0)]),
        np.array([(decode, 0.25, 1.75), (train, 1.75, 2.0)]),
    ]
    folder = tmp_path / "a" / "timeline"
    folder.mkdir()
    (folder / "step_00012.json").write_text(json.dumps(trace(lanes, "title")))
    (folder / "step_00012.png").write_bytes(b"")
    assert timeline_steps(run) == [12]
    found = read_timeline(run, 12)
    assert all(np.allclose(a, b, atol=1e-9) for a, b in zip(found, lanes, strict=True))
    assert reading.seconds_by_kind(found) == pytest.approx(
        {"generate": 1.5, "idle": 0.25, "train": 0.125, "between forwards": 0.125}
    )
    message = r"no .*step_00003.json: the run was not told run.timeline_steps=\[3\]"
    with pytest.raises(InputError, match=message):
        read_timeline(run, 3)
    assert reading.common_timelines(run, run) == [12]
    with pytest.raises(InputError, match="have no timeline of a common step"):
        reading.common_timelines(run, read_run(make_run(tmp_path / "b", [line(0, 1.0)])))
