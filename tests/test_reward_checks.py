"""Checks of reward functions before the first step, through the real entry point."""

import json
import os
import sys

import pyarrow.parquet
import pytest

import train
from bubblespec.rewards import math_equivalence
from bubblespec.rewards.code import passes_tests
from bubblespec.rewards.scorer import check_references
from bubblespec.types import Prompt
from tests.helpers.checks import refusal as refused
from tests.helpers.runs import read
from tests.test_bad_input import (  # noqa: F401 (fixtures)
    GOOD,
    data,
    options,
    refusal,
    run,
    surroundings,
)

HERE = "tests.helpers.rewards"
WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


@WORKERS
@pytest.mark.parametrize(
    "name, says",
    [
        ("too_few", "returned [1.0], not a list of 2 values, one per sample"),
        ("by_name", "returned {'0': 1.0}, not a list of 2 values"),
    ],
)
def test_function_without_rewards_is_refused(refusal, num_workers, name, says):  # noqa: F811
    message = refusal(f"reward.functions=[{HERE}.{name}]", f"reward.num_workers={num_workers}")
    assert message.startswith(f"reward.functions: {HERE}.{name}: ") and says in message


@WORKERS
def test_coroutines_run_and_failures_of_the_trial_warn(monkeypatch, tmp_path, num_workers):
    functions = f"reward.functions=[{HERE}.judge,{HERE}.picky]"
    code, said = run(monkeypatch, tmp_path / "out", functions, f"reward.num_workers={num_workers}")
    assert code == 0
    (warning,) = [line for line in said.splitlines() if "warning: reward" in line]
    assert "picky: raised ZeroDivisionError" in warning and "in a trial on the response" in warning
    (line,) = read(tmp_path / "out")
    assert line["reward/errors"] == 0 and {"rewards/judge/mean", "rewards/picky/mean"} <= set(line)


@WORKERS
def test_prints_of_the_trial_alone_are_marked(monkeypatch, tmp_path, capfd, num_workers):
    """Each line once, after a line that says what the trial is; those of the step are not."""
    given = [f"reward.functions=[{HERE}.talks]", f"reward.num_workers={num_workers}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *options(tmp_path / "out", *given)])
    assert train.main() == 0
    lines = "\n".join(capfd.readouterr()).splitlines()
    (trial,) = [line for line in lines if line.startswith("trying reward functions on ")]
    assert "the response '0' to the first prompt" in trial and "'reward trial: '" in trial
    printed = ["scoring 2 responses", "", "at once", "to the other file"]
    marked = [line for line in lines if line.startswith("reward trial: ")]
    assert sorted(marked) == sorted(f"reward trial: {line}" for line in printed)
    assert lines.count("scoring 2 responses") == 2, "two groups of one step"


@WORKERS
def test_arguments_of_trl_are_passed_and_logged(monkeypatch, tmp_path, num_workers):
    options = [f"reward.functions=[{HERE}.logs]", f"reward.num_workers={num_workers}"]
    options += ["run.max_steps=2", "run.save_rollouts=true"]
    code, said = run(monkeypatch, tmp_path / "out", *options)
    assert code == 0 and "warning" not in said
    lines = read(tmp_path / "out")
    assert [line["reward"] for line in lines] == [0.0, 0.5], "global_step / max_steps"
    for line in lines:
        assert line["logged/mean_size"] == pytest.approx(line["completions/mean_length"])
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "rollouts").to_pylist()
    assert len(rows) > 2
    for row in rows:
        columns = json.loads(row["columns"])
        assert columns["size"] == len(row["tokens"]) and columns["kind"].startswith("[[")
    samples = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    sample = json.loads(samples[0])
    assert sample["columns"]["size"] == sample["num_tokens"]


def test_hanging_trial_does_not_stop_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("FIRST_CALL", str(tmp_path / "first"))
    options = ["reward.num_workers=1", "reward.timeout_s=2"]
    function = "reward.functions=[tests.helpers.rewards.slow_at_first]"
    code, said = run(monkeypatch, tmp_path / "out", function, *options)
    assert code == 0 and "no answer within 4 s (timeout, in a trial on" in said


def test_failed_worker_start_is_refused(refusal, monkeypatch):  # noqa: F811
    """Its module exists in this process alone."""
    module = type(sys)("only_here")
    module.f = lambda completions, **columns: [1.0] * len(completions)
    monkeypatch.setitem(sys.modules, "only_here", module)
    message = refusal("reward.functions=[only_here.f]", "reward.num_workers=1")
    assert message.startswith("reward.functions: a worker process could not be started")


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_column_with_an_arguments_name(refusal, data, monkeypatch, tmp_path, name):  # noqa: F811
    rows = [row | {name: "x"} for row in GOOD]
    message = refusal(*data("rows.jsonl", rows))
    assert message.startswith(f"data.columns: the column '{name}' of the data is named like an ")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    options = [f"data.columns={{my_{name}: {name}}}", f"reward.functions=[{__name__}.note_columns]"]
    code, _ = run(monkeypatch, tmp_path / "out", *data("rows.jsonl", rows), *options)
    assert code == 0
    assert (tmp_path / "seen").read_text() == f"answer,my_{name}"


def note_columns(prompts, completions, completion_ids, **columns):
    with open(os.environ["SEEN"], "w") as file:
        file.write(",".join(sorted(columns)))
    return [float(len(text)) for text in completions]


def test_column_name_may_have_a_dot(data, monkeypatch, tmp_path):  # noqa: F811
    rows = [{"prompt": row["prompt"], "extra.answer": row["answer"]} for row in GOOD]
    options = [*data("rows.jsonl", rows), "data.columns={answer: extra.answer}"]
    assert run(monkeypatch, tmp_path / "out", *options)[0] == 0


# References


def prompts_of(**columns) -> list[Prompt]:
    (name, values) = next(iter(columns.items()))
    return [Prompt(n, f"row {n}", (1,), {name: value}) for n, value in enumerate(values)]


def test_rows_without_reference_are_named(capsys):
    functions = {"a.math": math_equivalence}
    check_references(functions, prompts_of(answer=["5", "\\frac{1}{2}", "#### 1,080"]), "the data")
    assert capsys.readouterr().err == ""
    check_references(functions, prompts_of(answer=["5", "", None, "x+"]), "the data")
    said = capsys.readouterr().err
    assert said.startswith("warning: no reward function can score ") and "of 4 rows" in said
    assert "the first is 'row 1', answer ''" in said
    message = refused(check_references, functions, prompts_of(answer=["", None]), "the data")
    assert message.startswith("reward.functions: no reward function can score 2 of 2 rows")
    both = functions | {"b.other": lambda **columns: None}
    check_references(both, prompts_of(answer=[""]), "the data")
    code = {"a.code": passes_tests}
    assert "2 of 2 rows" in refused(
        check_references, code, prompts_of(tests=[None, []]), "the data"
    )
    assert capsys.readouterr().err == ""
    suite = "def check(candidate):\n    assert candidate(2) == 3"  # nothing calls it
    check_references(code, prompts_of(tests=["assert f(2) == 3", suite]), "the data")
    said = capsys.readouterr().err
    assert "1 of 2 rows" in said and "tests 'def check(" in said and "an empty program" in said


@pytest.mark.parametrize(
    "answer", ["5", "-1,080.5", "#### 7", "\\frac12", "x", "", None, "\\", 0.5]
)
def test_references_are_judged_as_in_a_call(answer):
    given = {"prompts": ["p"], "completions": ["5"], "completion_ids": [[1]], "answer": [answer]}
    is_scored = math_equivalence(**given) != [None]
    assert math_equivalence.can_score({"answer": answer}) == is_scored


@pytest.mark.parametrize("name, missing", [("math_equivalence", ""), ("exact_match", None)])
def test_run_goes_on_without_the_row(data, monkeypatch, tmp_path, name, missing):  # noqa: F811
    rows = [*GOOD, {"prompt": "5 + 1 =", "answer": missing}, {"prompt": "6 + 1 =", "answer": "7"}]
    options = [f"reward.functions=[bubblespec.rewards.{name}]", "run.max_steps=3"]
    code, said = run(monkeypatch, tmp_path / "out", *data("rows.jsonl", rows), *options)
    assert code == 0 and "no reward function can score 1 of 6 rows of the data" in said
    assert sum(line.get("reward/left_out", 0) for line in read(tmp_path / "out")) == 1
    counts = [line.get(f"rewards/{name}/missing", 0) for line in read(tmp_path / "out")]
    assert sum(counts) == 2, "both responses"
