"""The pictures of docs/images that need no training run."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bubblespec.telemetry.timeline import KINDS
from notebooks import images
from tests.helpers.warm import ROOT

SLOW = "step_eight_ranks"  # a minute of simulation


def test_documented_pictures_exist():
    stored = {path.stem for path in Path(images.FOLDER).glob("*.png")}
    of_runs = {"reward_vs_trl", "tiny_run", "smollm2_learning", "tensorboard", "fitted_costs"}
    assert set(images.IMAGES) <= stored <= set(images.IMAGES) | of_runs
    pages = [Path(ROOT, "README.md"), *Path(ROOT, "docs").rglob("*.md")]
    shown = set(re.findall(r"images/(\w+)\.png", "".join(page.read_text() for page in pages)))
    assert shown == stored


def test_pictures_are_drawn_by_name(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(images, "FOLDER", str(tmp_path))
    names = [name for name in images.IMAGES if name != SLOW]
    monkeypatch.setattr(sys, "argv", ["images", *names])
    assert images.main() == 0
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in names)
    monkeypatch.setattr(sys, "argv", ["images", "nothing"])
    assert images.main() == 2
    assert "error: nothing unknown; valid are step_eight_ranks, " in capsys.readouterr().err


def test_eight_rank_picture_equals_simulation(monkeypatch):
    """Both arms of one step are there, in real seconds, with training at the end."""
    seen = {}
    for name, value in {"LONGEST": 3200, "PROMPTS": 8, "GENERATIONS": 2, "STEPS": 6}.items():
        monkeypatch.setattr(images, name, value)
    draw = images.draw_timelines
    monkeypatch.setattr(
        images, "draw_timelines", lambda lanes, columns: seen.update(lanes) or draw(lanes, columns)
    )
    figure = images.step_eight_ranks()
    assert "SIMULATED, not measured" in figure.get_suptitle()
    before, after = seen
    assert before.startswith("without drafts: ") and after.endswith("with the same tokens")
    train_s = {round(lane[-1, 2] - lane[-1, 1], 9) for lanes in seen.values() for lane in lanes}
    assert len(train_s) == 1, "both arms train on the same tokens"
    for title, lanes in seen.items():
        assert len(lanes) == 8
        assert all(lane[-1, 0] == KINDS.index("train") for lane in lanes)
        (end_s,) = {round(lane[-1, 2], 6) for lane in lanes}
        assert f": {end_s:.0f} s" in title


def test_training_flops_are_eight_per_parameter_and_token():
    """7.07e9 parameters in products, 28 layers and the head; 32 x 400 tokens on eight ranks, half
    of an H200's 989e12 operations."""
    step = SimpleNamespace(response_tokens=400)
    layer = 3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944
    wanted = 8 * (28 * layer + 152_064 * 3584) * (32 * 400 / 8) / 494.5e12
    assert images.train_s(step) == pytest.approx(wanted, rel=1e-9)


def test_first_mismatch_is_drawn_inside_drafts_only():
    tokens = np.array([1, 2, 3, 4, 5, 6, 7])
    assert images.first_mismatch(tokens, np.array([1, 2, 3, 4, 9, 9])) == 4
    assert images.first_mismatch(tokens, np.array([1, 2, 3, 4, 9])) == 0
    assert images.first_mismatch(tokens, tokens) == 0


def test_memory_picture_of_7b_has_sizes_of_parts():
    """Two bytes a weight, four a gradient, an eighth of twelve for the optimizer; whole cards."""
    (axes,) = images.memory_7b().axes
    widths = [round(bar.get_width(), 2) for bar in axes.patches]
    parameters = 7.6156
    wanted = [2 * parameters, 4 * parameters, 12 * parameters / 8]
    assert widths[:3] == pytest.approx(wanted, abs=0.02)
    rows = {}
    for bar in axes.patches:
        rows.setdefault(bar.get_y(), []).append(bar.get_width())
    wanted = [79.1 * 2**30 / 1e9] * 2 + [139.7 * 2**30 / 1e9] * 2
    assert [sum(row) for row in rows.values()] == pytest.approx(wanted)
