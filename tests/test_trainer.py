"""A run that cannot go on says so: through the entry point, in this process."""

import json
import math
import sys

import pytest
import torch
from test_train import SHORT, weights

import train
from bubblespec import update


def run_main(monkeypatch, folder, *overrides: str) -> int:
    options = [*SHORT, "run.max_steps=6", "run.save_steps=0", "eval.num_prompts=0", f"run.output_dir={folder}", *overrides]
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "configs/tiny_cpu.yaml", *options])
    monkeypatch.delenv("RANK", raising=False)
    return train.main()


@pytest.mark.parametrize("broken_steps, exit_code, num_lines", [((1, 3, 4), 0, 6), ((2, 3, 4), 1, 4)])
def test_steps_without_an_update_in_a_row_end_the_run(monkeypatch, tmp_path, capsys, broken_steps, exit_code, num_lines):
    """Two may follow each other, three may not."""
    original = update._accumulate_gradient

    def sometimes_broken(model, reference, batch, *arguments):
        measured = original(model, reference, batch, *arguments)
        step = len(read(tmp_path))
        return measured * math.nan if step in broken_steps else measured

    def read(folder) -> list[dict]:
        path = folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    monkeypatch.setattr(update, "_accumulate_gradient", sometimes_broken)
    assert run_main(monkeypatch, tmp_path, "optim.max_skipped_steps=2") == exit_code
    lines = read(tmp_path)
    assert [line["skipped_updates"] for line in lines] == [int(step in broken_steps) for step in range(num_lines)]
    assert all((line["learning_rate"] == 0) == (line["loss"] is None) == bool(line["skipped_updates"]) for line in lines)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    if exit_code:
        assert len(errors) == 1 and "not finite in 3 steps in a row, up to step 4" in errors[0]
    else:
        assert not errors and all(torch.isfinite(t).all() for t in weights(tmp_path, 6).values())
