"""The notebooks, executed from top to bottom in kernels of their own, and what they find."""

import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from notebooks import refresh

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture
def working_copy(tmp_path, monkeypatch) -> Path:
    """A tree whose notebooks are copies and the rest links; the user's own Jupyter settings and
    history are not in sight."""
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT / "notebooks", tree / "notebooks", ignore=shutil.ignore_patterns("__pycache__", ".*")
    )
    for name in ("bubblespec", "benchmarks", "configs", "docs"):
        (tree / name).symlink_to(ROOT / name)
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)  # a notebook finds the project by itself
    return tree


def execute(tree: Path, name: str, wanted: str = "None", **changed: str):
    """Run a notebook where Jupyter would, with top-level names of one line set to other values;
    without any, what it prints and shows as text must be what is stored in it. Returns it as
    executed, and the value of the expression `wanted` at its end. Raises CellExecutionError."""
    notebook = nbformat.read(tree / "notebooks" / f"{name}.ipynb", as_version=4)
    for variable, value in changed.items():
        cells = [
            cell
            for cell in notebook.cells
            if cell.cell_type == "code" and cell.source.startswith(f"{variable} = ")
        ]
        assert len(cells) == 1 and cells[0].source.count("\n") == 0
        cells[0].source = f"{variable} = {value!r}"
    stored = [text(notebook, kind, 0) for kind in ("stdout", "markdown")]
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\n\nprint(json.dumps({wanted}))"))
    refresh.execute(notebook, str(tree / "notebooks"))
    if not changed:
        assert [text(notebook, kind) for kind in ("stdout", "markdown")] == stored, (
            f"run python -m notebooks.refresh {name}"
        )
    return notebook, json.loads(
        "".join(output.text for output in notebook.cells[-1].outputs if output.name == "stdout")
    )


def pictures(notebook) -> int:
    return sum(
        "image/png" in output.get("data", {})
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )


def text(notebook, kind: str, num_added: int = 1) -> str:
    """All that the cells have printed, or shown as Markdown; num_added: cells at the end that are
    not the notebook's own."""
    outputs = [
        output
        for cell in notebook.cells[: len(notebook.cells) - num_added]
        for output in cell.get("outputs", [])
    ]
    if kind == "markdown":
        return "\n".join(
            output.data["text/markdown"]
            for output in outputs
            if "text/markdown" in output.get("data", {})
        )
    return "".join(output.text for output in outputs if output.get("name") == kind)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_kept_with_outputs(name):
    """As one execution from top to bottom has left them; with pictures, and nothing of the machine
    that made them."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)) and len(
        code
    ) > 3
    outputs = [output for cell in code for output in cell.outputs]
    assert pictures(notebook) > 1 and all(output.output_type != "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert str(ROOT) not in json.dumps(notebook) and "/tmp" not in json.dumps(notebook)


def test_recorded_data_are_small():
    files = [
        path for path in (ROOT / "notebooks").rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    assert sum(path.stat().st_size for path in files if path.suffix != ".ipynb") < 1_000_000
    assert all(path.stat().st_size < 1_500_000 for path in files)


def test_exactness(working_copy):
    wanted = """{
        "equal": num_equal, "rows": len(plain), "forwards": num_forwards,
        "accepted": {name: s.accepted_share for name, s in proposers.items()},
        "p": p_values, "acceptance": acceptance, "best": float(law.max()), "samples": int(counts["coupled"].sum()),
        "same": bool((counts["coupled"] == counts["point_mass"]).all()),
        "mean": [means[arm] for arm in arms], "error": [errors[arm] for arm in arms], "true_mean": true_mean,
        "length_p": [length_p[arm] for arm in arms],
    }"""
    notebook, found = execute(working_copy, "exactness", wanted)
    assert pictures(notebook) == 3
    assert (
        len(found["equal"]) == 5
        and set(found["equal"].values()) == {found["rows"]}
        and found["rows"] == 32
    )
    forwards, accepted = found["forwards"], found["accepted"]
    assert forwards["adversarial"] == forwards["no drafts"] < forwards["3 slots"]
    assert forwards["perfect"] <= forwards["older weights"] < forwards["no drafts"] / 4
    assert (
        accepted["perfect"] == 1.0
        and accepted["adversarial"] == 0.0
        and 0.9 < accepted["older weights"] < 1.0
    )
    # Both rules draw from the softmax, and are not the same draws.
    assert min(found["p"].values()) > 1e-3 and not found["same"]
    error = (found["best"] * (1 - found["best"]) / found["samples"]) ** 0.5
    assert 0.2 < found["best"] < 0.9
    assert all(abs(share - found["best"]) < 4 * error for share in found["acceptance"].values())
    # The trap: only rejection with finished drafts is off, and far too short.
    off = [
        (mean - found["true_mean"]) / error
        for mean, error in zip(found["mean"], found["error"], strict=True)
    ]
    assert off[1] < -15 and max(abs(off[i]) for i in (0, 2, 3)) < 4
    assert found["length_p"][1] < 1e-20 and min(found["length_p"][i] for i in (0, 2, 3)) > 1e-3


def test_tail_batching(working_copy):
    notebook, found = execute(
        working_copy, "tail_batching", '{"summary": summary, "steps": rounds.NUM_STEPS}'
    )
    assert pictures(notebook) == 2
    ratio = {name: mean for name, (mean, _) in found["summary"].items()}
    tokens = {name: sequential for name, (_, sequential) in found["summary"].items()}
    plain, ours, anew, race, both = found["summary"]
    assert ratio[plain] == tokens[plain] == 1.0
    assert abs(ratio[ours] - 1) < 0.02 and tokens[ours] < 0.8
    assert ratio[anew] < 0.95 and max(ratio[race], ratio[both]) < 0.8


def test_bubble_anatomy(working_copy):
    wanted = """{
        "same": compare(after, before).first_difference is None, "steps": len(after.steps),
        "step_s": [run.steps[STEP]["timing_s/step"] for run in (before, after)], "forwards": compare(after, before).forwards,
        "kinds": [sum(seconds_by_kind(lanes).values()) for lanes in [*lanes_before.values(), *lanes_after.values()]],
        "accepted": accepted, "generated": generated,
    }"""
    notebook, found = execute(working_copy, "bubble_anatomy", wanted)
    assert pictures(notebook) == 6
    assert found["same"] and found["steps"] == 30
    assert found["forwards"] < -0.4
    assert found["kinds"] == pytest.approx(
        found["step_s"], rel=0.05
    )  # ranks begin a step a little apart
    assert 0.3 < found["accepted"] / found["generated"] < 1


def test_ablation(working_copy):
    wanted = "{run.name: [c.num_same, c.forwards, c.rollout_speedup] for run in runs for c in [compare(run, baseline)]}"
    notebook, found = execute(working_copy, "ablation", wanted)
    assert pictures(notebook) == 3
    assert list(found) == ["none", "bubble", "bubble+suffix", "suffix"]
    assert all(num_same == 30 for num_same, _, _ in found.values()) and found["none"][1:] == [
        0.0,
        1.0,
    ]
    assert found["bubble+suffix"][1] < min(found["bubble"][1], found["suffix"][1]) < 0
    tables = text(notebook, "markdown")
    assert "| run | speculative.method |" in tables and "the same in all 30 steps" in tables
    assert (
        "| bubble+suffix | bubble+suffix |" in tables
        and f" {found['bubble+suffix'][2]:.2f}x |" in tables
    )


def test_scaling(working_copy):
    wanted = """{
        "speedup": speedup, "ranks": {n: speedup for n, (speedup, _) in by_ranks.items()}, "cells": len(cells_of(read(MAP))),
        "waiting": {n: waiting for n, (_, waiting) in by_ranks.items()},
        "mismatch": {n: speedup for n, (speedup, _) in by_mismatch.items()},
        "same": [a.digest == b.digest for a, b in zip(*steps.values())],
    }"""
    notebook, found = execute(working_copy, "scaling", wanted)
    assert pictures(notebook) == 4 and found["cells"] > 4
    assert found["same"] == [True] * 6, "drafts change no token here either"
    assert found["speedup"] > 1.2
    assert found["waiting"]["1"] < 0.01 < 0.2 < found["waiting"]["2"] < found["waiting"]["8"]
    assert found["mismatch"]["400"] > found["mismatch"]["25"]


def test_systems(working_copy):
    wanted = """{
        "speedups": {run["system"]: run["speedup"] for run in runs if (run["size"], run["longest"]) == ("7b", 16000)},
        "measured": {name: system["speedup"] for name, system in real["systems"].items()},
    }"""
    notebook, found = execute(working_copy, "systems", wanted)
    assert pictures(notebook) == 3
    of_systems = found["speedups"]
    each = [
        of_systems[name] for name in ("drafts of idle time", "learned drafter", "tail batching")
    ]
    assert min(each) > 1.2 and of_systems["all"] > max(each) and of_systems["plain"] == 1.0
    best = "all, 3 tokens a pass"
    assert (
        of_systems[best]
        > of_systems[f"{best}; without tail batching"]
        > of_systems[f"{best}; without the drafter"]
        > 1.5
    )
    assert next(iter(found["measured"])) == "plain" and found["measured"]["plain"] == 1.0
    tables = text(notebook, "markdown")
    assert (
        f"| all | {found['measured']['all']:.2f}x |" in tables
        and "TLT (2511.16665): 1.7x end to end" in tables
    )


def test_drafter(working_copy):
    notebook, found = execute(working_copy, "drafter", "report")
    assert pictures(notebook) == 2
    coupled, other = found["accepted"]["coupled"], found["accepted"]["point_mass"]
    assert sum(coupled) > sum(other) > 0.3 and sorted(coupled, reverse=True) == coupled
    printed = text(notebook, "stdout")
    assert f"{1 + sum(coupled):.2f} tokens a pass" in printed and "step 4: " in printed
    assert text(notebook, "markdown").count("x | 0 |") == len(found["by_rows"]) == 4


def test_a_report_of_another_benchmark_is_one_line(working_copy):
    with pytest.raises(CellExecutionError) as caught:
        execute(working_copy, "drafter", REPORT="notebooks/data/systems.json")
    shown = caught.value.traceback.rpartition("-" * 18)[2].strip()
    assert (
        shown
        == "error: notebooks/data/systems.json: it has no accepted; is it of another benchmark?"
    )


def test_ablation_of_other_runs_leaves_out_what_is_no_run_and_what_is_torn(working_copy, tmp_path):
    """A path of the user's own, as absolute path: no run with method none; one killed in a write;
    one not begun."""
    shutil.copytree(
        working_copy / "notebooks" / "data" / "runs" / "suffix", tmp_path / "mine" / "a"
    )
    shutil.copytree(tmp_path / "mine" / "a", tmp_path / "mine" / "b")
    with open(tmp_path / "mine" / "b" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 30, "rewa')
    (tmp_path / "mine" / "c").mkdir()
    notebook, found = execute(
        working_copy, "ablation", "[len(run.steps) for run in runs]", RUNS=str(tmp_path / "mine")
    )
    assert found == [30, 30]
    path = tmp_path / "mine"
    torn = f"left out: the last line of {path}/b/metrics.jsonl, which is torn"
    assert text(notebook, "stderr").splitlines() == [
        torn,
        f"left out: {path}/c has no metrics.jsonl",
    ]
    assert "No run here has speculative.method=none: all are compared with a." in text(
        notebook, "stdout"
    )


@pytest.mark.parametrize(
    "made, says", [(None, "no folder at"), ([], "no run in"), (["a"], "has no metrics.jsonl")]
)
def test_bad_path_is_one_line(working_copy, tmp_path, made, says):
    for folder in [] if made is None else ["", *made]:
        os.makedirs(tmp_path / "mine" / folder, exist_ok=True)
    with pytest.raises(CellExecutionError) as caught:
        execute(working_copy, "ablation", RUNS=str(tmp_path / "mine"))
    shown = caught.value.traceback.rpartition("-" * 18)[2].strip()  # behind the cell's source
    assert shown.startswith("error: RUNS: ") and says in shown and "\n" not in shown
