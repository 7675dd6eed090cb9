"""The pictures of docs/images that need no training run."""

import re
import sys
from pathlib import Path

from notebooks import images, run_picture
from tests.helpers.warm import ROOT

SLOW = "step_eight_ranks"  # a minute of simulation


def test_documented_pictures_exist():
    stored = {path.stem for path in Path(images.FOLDER).glob("*.png")}
    of_runs = {"reward_vs_trl", "tiny_run", "fitted_costs"}
    assert set(images.IMAGES) <= stored <= set(images.IMAGES) | of_runs
    pages = [Path(ROOT, "README.md"), *Path(ROOT, "docs").rglob("*.md")]
    shown = set(re.findall(r"images/(\w+)\.png", "".join(page.read_text() for page in pages)))
    assert shown == stored


def test_pictures_are_drawn_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(images, "FOLDER", str(tmp_path))
    names = [name for name in images.IMAGES if name != SLOW]
    monkeypatch.setattr(sys, "argv", ["images", *names])
    assert images.main() == 0
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in names)


def test_run_is_drawn_and_folder_without_run_refused(monkeypatch, tmp_path, capsys):
    recorded = [f"{ROOT}/notebooks/data/runs/{name}" for name in ("none", "bubble")]
    picture = tmp_path / "run.png"
    monkeypatch.setattr(sys, "argv", ["run_picture", *recorded, "--output", str(picture)])
    assert run_picture.main() == 0
    assert picture.stat().st_size > 10_000 and str(picture) in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["run_picture", str(tmp_path)])
    assert run_picture.main() == 2
    assert capsys.readouterr().err.startswith("error: ")
