"""What a run shows: numbers worked out by hand, and a bar that no line tears."""

import io
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from bubblespec.config import Config, TaskConfig
from bubblespec.errors import log
from bubblespec.telemetry import console, summary
from bubblespec.telemetry.console import Console, find_hints
from bubblespec.telemetry.summary import Facts, History
from bubblespec.types import Group, Prompt
from tests.helpers.rows import LETTERS, samples_of

METRICS = {
    "reward": 0.25,
    "frac_reward_zero_std": 0.5,
    "completions/mean_length": 38.125,
    "completions/max_length": 400,
    "completions/clipped_ratio": 0.125,
    "entropy": 0.5,
    "timing_s/gen": 2.0,
    "timing_s/bubble": 1.0,
    "timing_s/reward": 0.125,
    "timing_s/train": 0.5,
    "timing_s/sync": 0.25,
    "timing_s/step": 4.0,
    "perf/throughput": 1234.5,
}
DRAFTS = {
    "rollout/spec_accept_rate": 0.75,
    "rollout/spec_accepted_tokens": 3000,
    "rollout/spec_wasted_tokens": 1000,
    "rollout/modelled_s": 4.0,
    "guard/is_on": 1,
}
HARDWARE = {"gpu": None, "cpu": "Fast 9000", "threads": 1, "cores": 8}
SIZES = {"num_parameters": 1_540_000_000, "num_trained": 1_540_000_000, "num_deferred": 0}
SIZES |= {"num_prompts": 9872, "num_held_out": 128, "num_dropped": 0, "num_updates": 0}
SIZES["num_duplicates"] = 0
FACTS = Facts(num_ranks=4, hardware=HARDWARE, kernel="sdpa", checkpoint=None, **SIZES)


def make_config(**sections) -> Config:
    config = Config()
    config.model.path, config.model.dtype = "my/model", "bfloat16"
    config.data.path = "problems.jsonl"
    config.run.output_dir, config.run.max_steps = "runs/a", 60
    config.rollout.num_prompts_per_step, config.rollout.num_generations = 10, 3
    for key, value in sections.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    return config


# The start


def start(config: Config, **facts) -> dict[str, str]:
    """Return the lines at the start by the word before the colon."""
    lines = summary.start_lines(config, replace(FACTS, **facts))
    return {name: text for name, _, text in (line.partition(": ") for line in lines)}


def test_start_names_model_ranks_step_and_data():
    said = start(make_config())
    assert "1.54 B parameters, bfloat16" in said["model"] and "trained" not in said["model"]
    assert "4 on CPU (Fast 9000, 1 thread per rank), sdpa" in said["ranks"]
    assert "10 prompts x 3 responses of up to 512 tokens; 7.5 responses" in said["step"]
    for part in ("9,872 prompts from problems.jsonl", "128 held out", "none dropped"):
        assert part in said["data"]
    assert "(bubble)" in said["drafts"] and "(suffix)" in said["drafts"]
    assert said["output"] == "runs/a, a new run of 60 steps" and "tail batching" not in said
    assert said["TensorBoard"] == "tensorboard --logdir runs/a/tensorboard"
    assert said["eight main charts"].endswith("/#custom_scalars")
    tasks = [TaskConfig(name="chain_sum"), TaskConfig(name="gcd"), TaskConfig(name="chain_sum")]
    config = make_config(data__tasks=tasks, speculative__method="none", tail_batching__enabled=True)
    hardware = FACTS.hardware | {"gpu": "Card 1"}
    said = start(config, hardware=hardware, num_trained=8_000_000, num_dropped=3, num_duplicates=5)
    assert "8 M of them trained" in said["model"] and "4 on Card 1" in said["ranks"]
    assert "(chain_sum, gcd), 128 held out, 5 left out as equal to these; 3 dropped" in said["data"]
    assert said["drafts"] == "none (speculative.method=none)" and "tail batching" in said


@pytest.mark.parametrize(
    "num_updates, scheduler, ending",
    [
        (20, "cosine", "after 20 of 60 steps from runs/a/checkpoint-20"),
        (60, "constant", "set run.max_steps=120 to continue"),
        (60, "cosine", "model.path=runs/a/checkpoint-60"),
    ],
)
def test_resumed_run_shows_progress_and_how_to_extend(num_updates, scheduler, ending):
    config = make_config(optim__lr_scheduler_type=scheduler)
    checkpoint = f"runs/a/checkpoint-{num_updates}"
    line = start(config, num_updates=num_updates, checkpoint=checkpoint)["output"]
    assert line.endswith(ending) and ("run complete (60 steps)" in line) == (num_updates == 60)


# Steps and evaluations


def without_drafts(ratio: float) -> dict:
    """A step that is compared with those that have drafts. ratio: measured over modelled
    seconds."""
    return METRICS | {"rollout/modelled_s": 3.0 / ratio}


def history_of(*steps: dict, **fields) -> History:
    history = History(**fields)
    for metrics in steps:
        history.add(metrics)
    return history


def test_step_shows_seconds_saved_by_drafts():
    """In steps without drafts the model's error is 1.5 in the median, so the two with drafts,
    modelled as 4 s each, would have taken 6 s each instead of 3 s."""
    metrics, off = METRICS | DRAFTS, {"guard/is_on": 0}
    text = "; ".join(summary.step_parts(metrics, history_of(metrics), 0.0))
    assert text.endswith("; 3,000 draft tokens accepted (75%)")
    plain = [without_drafts(ratio) | off for ratio in (9.0, 1.5)]
    history = history_of(metrics | off, *plain, without_drafts(1.0), metrics)
    text = "; ".join(summary.step_parts(metrics, history, 83.0))
    assert text.startswith("reward 0.250, length 38.1, clipped 12%; 1 min 23 s left; 4.00 s; gen")
    assert "generate 3.00, train 0.75, rest 0.25" in text and text.endswith(" 6.0 s saved so far")
    last = " ".join(summary.step_parts(METRICS, History(), 0.0))
    assert "left" not in last and "draft" not in last
    slow = history_of(metrics | off | {"rollout/modelled_s": 1.0}, plain[1])
    assert summary.step_parts(metrics, slow, 0.0)[-1].endswith(", 1.5 s lost so far")


def test_tail_batching_counts_deferred_prompts_and_rounds():
    """Three short rounds, the second of which defers nothing, and a long one; two prompts were
    waiting before."""
    history, texts = History(num_waiting=2), []
    for is_long, waiting in [(0, 5), (0, 5), (0, 12), (1, 2)]:
        metrics = METRICS | {"tail/is_long_round": is_long, "tail/num_deferred": waiting}
        history.add(metrics)
        texts.append(summary.step_parts(metrics, history, 0.0)[-1])
    assert texts[1].startswith("short round, 5 prompts") and texts[3] == "long round"
    assert re.findall(r"\d+", summary.deferred_text(history)) == ["10", "3", "1", "2"]
    nothing = history_of(METRICS | {"tail/is_long_round": 0, "tail/num_deferred": 0})
    assert "no prompt was deferred in 1 short round" in summary.deferred_text(nothing)


def evaluation(reward: float) -> dict:
    found = {"eval/reward": reward, "eval/pass@1": reward, "eval/pass@8": 0.75}
    found |= {"eval/pass@16": 0.875, "eval/completions/mean_length": 21.0, "timing_s/eval": 0.5}
    return found | {"eval/completions/clipped_ratio": 0.0, "eval/reward/errors": 0}


def test_evaluation_and_sample_lines():
    line = summary.evaluation_line(20, evaluation(0.5))
    for part in ("after 20 steps", "0.500", "pass@16 0.875", "length 21.0", "0%", "(0.5 s)"):
        assert part in line
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 +\n1 ="}]
    rewards = {"my.match": 1.0, "other.form": -0.25, "other.rest": math.nan}
    reply = "\x1b[31mso " + "long " * 100 + "2"
    prompt_line, response, *rest = summary.sample_lines(prompt, reply, rewards, {"solution": 2})
    assert prompt_line == "  prompt: 1 + 1 ="
    assert response.startswith("  response: [31mso long ") and response.endswith(" long 2")
    assert len(response) <= len("  response: ") + summary.WIDTH and " ... " in response
    assert rest == ["  solution: 2", "  reward: match 1, form -0.25, rest nan"]
    assert len(summary.sample_lines("p", "r", rewards, {"level": 1})) == 3


# The end


def end(config: Config, history: History, seconds: float = 0.0, **run) -> list[str]:
    options = {"num_updates": 60, "checkpoint": "runs/a/checkpoint-60", "is_stopped": False}
    history.seconds = seconds
    return summary.end_lines(config, history, **options | run)


def test_end_compares_first_and_last_steps_and_evaluations():
    """Twenty steps of a resumed run: the first two against the last two."""
    steps = [METRICS | DRAFTS | {"reward": n / 32, "entropy": 4e-4} for n in range(20)]
    steps[9] = without_drafts(2.0) | {"reward": 9 / 32, "entropy": 0.0}
    steps[8] = steps[8] | {"guard/is_on": 0}
    history = history_of(*steps, set_up_s=10.0)
    history.evaluations = [(0, evaluation(0.5)), (60, evaluation(0.75))]
    lines = end(make_config(), history, 200.0)
    rows = {line[:28].strip(): line[28:].split() for line in lines if line[28:].strip()}
    assert re.fullmatch(r" {28,}steps 41-42 +steps 59-60", lines[0])
    assert rows["reward"] == ["0.016", "0.578"]  # means of 0 and 1, and of 18 and 19, of 32
    assert rows["longest response"] == ["400", "400"]
    assert rows["groups of equal rewards"] == ["50%", "50%"]
    assert rows["held-out reward"] == ["0.500", "0.750"] and rows["pass@16"] == ["0.875"] * 2
    assert rows["entropy"] == rows["rewards that failed"] == ["0.000"] * 2 and "pass@1" not in rows
    assert rows["waiting for rewards"] == ["0.125"] * 2
    assert lines[lines.index("") + 1].split() == ["after", "0", "after", "60"]
    facts = {name: text for name, _, text in (line.partition(": ") for line in lines[-7:])}
    assert facts["finished"] == "60 of 60 steps"
    times = re.findall(r"(?:\d+ min )?\d+ s\b", facts["time"])
    assert times == ["3 min 20 s", "10 s", "1 min 0 s", "15 s", "1 min 55 s"]
    for part in ("57,000 of 76,000", "(75%)", "1 min 35 s of generation saved", "with 1 step "):
        assert part in facts["drafts"]
    assert facts["checkpoint"].startswith("runs/a/checkpoint-60 ")
    assert facts["metrics"] == "runs/a/metrics.jsonl"


def test_end_of_runs_with_few_steps():
    files = ["metrics: runs/a/metrics.jsonl"]
    files.append("TensorBoard: tensorboard --logdir runs/a/tensorboard")
    files.append(f"eight main charts: {summary.CHARTS_URL}")
    assert end(make_config(), History(), checkpoint=None) == files
    options = {"num_updates": 0, "checkpoint": None, "is_stopped": True}
    stopped = "stopped after 0 of 60 updates; run the same command to resume"
    assert end(make_config(), History(), **options) == [*files, stopped]
    lines = end(make_config(), history_of(METRICS), num_updates=1)
    assert lines[0].split() == ["step", "1"] and "drafts: none were verified" in lines
    nothing = end(make_config(), history_of(METRICS | {"reward": 0.0}))
    assert ["reward", "0.000"] in [line.split() for line in nothing]
    assert any("it-does-not-learn.md" in line for line in nothing)
    assert not any("it-does-not-learn.md" in line for line in lines)
    lost = METRICS | DRAFTS | {"rollout/modelled_s": 2.0, "guard/is_on": 0}
    accepted = {"drafter/accepted_1": 0.46, "drafter/accepted_2": 0.24, "drafter/accepted_3": 0.12}
    history = history_of(lost, without_drafts(0.5) | accepted)
    text = "\n".join(end(make_config(speculative__method="drafter"), history))
    assert "2.0 s of generation lost" in text, "3 s instead of 1 s"
    (line,) = [line for line in text.splitlines() if "learned drafter" in line]
    assert re.findall(r"\d+%", line) == ["46%", "24%", "12%"]
    assert not any("learned drafter" in line for line in lines)


@pytest.mark.parametrize(
    "function, texts",
    [
        (summary.compact, {1e-6: "0.000", 0.4687: "0.469", -1.5: "-1.50", 38.125: "38.1"}),
        (summary.compact, {120: "120", 1234.56: "1,235", math.nan: "-", math.inf: "-"}),
        (summary.duration, {0.04: "0.0 s", 9.94: "9.9 s", 9.96: "10 s", 59.6: "1 min 0 s"}),
        (summary.duration, {3599.7: "1 h 0 min", 7260: "2 h 1 min", 49 * 3600: "2 d 1 h"}),
    ],
)
def test_numbers_are_short(function, texts):
    assert [function(value) for value in texts] == list(texts.values())


# Hints


def drafts(accepted: int, wasted: int) -> dict:
    return {"rollout/spec_accepted_tokens": accepted, "rollout/spec_wasted_tokens": wasted}


EQUAL, OTHER = {"frac_reward_zero_std": 1.0}, {"frac_reward_zero_std": 0.99}
CUT, WHOLE = {"completions/clipped_ratio": 1.0}, {"completions/clipped_ratio": 0.99}


@pytest.mark.parametrize(
    "steps, first, parts",
    [
        ([EQUAL, EQUAL, OTHER, EQUAL, EQUAL, OTHER], None, ()),
        ([EQUAL, EQUAL, OTHER, *[EQUAL] * 4, OTHER, *[EQUAL] * 4], 5, ("reward.functions",)),
        ([WHOLE] * 3, None, ()),
        ([{}, *[CUT] * 3], 1, ("rollout.max_completion_length = 512",)),
        ([drafts(0, 1999)], None, ()),
        ([drafts(100, 1900)] * 3, None, ()),
        (
            [drafts(2000, 0), drafts(0, 1000), *[drafts(99, 901)] * 6],
            2,
            ("5.0% of the latest 2,000 draft tokens", "speculative.method=none"),
        ),
    ],
)
def test_hint_is_given_once_when_due(capsys, steps, first, parts):
    """Bad steps in a row, or the latest 2,000 draft tokens, count; good ones before do not."""
    shown = Console(make_config(), is_on=True)
    shown.end_set_up(0)
    for step, metrics in enumerate(steps, start=1):
        shown.show_step(step, METRICS | metrics)
    lines = capsys.readouterr().err.splitlines()
    hints = [line for line in lines if line.startswith("hint: ")]
    assert len(hints) == (first is not None)
    if first is not None:
        before = lines[lines.index(hints[0]) - 1]
        assert before.startswith(f"{first + 1}/60 steps") and f"after {first + 1} step" in hints[0]
        assert all(part in hints[0] for part in parts)


def test_batch_estimators_need_no_differing_rewards():
    config = make_config(loss__advantage_estimator="reinforce_plus_plus")
    assert find_hints(config, history_of(*[METRICS | EQUAL] * 3)) == {}


# The screen


def test_evaluations_show_different_prompts(capsys):
    groups = [Group(Prompt(u, f"question {u}", (1,), {"answer": u}), 0) for u in range(2)]
    samples = samples_of(groups, [np.array([i], np.int32) for i in range(4)])
    samples.rewards[:, 0] = [0.0, 0.25, 0.5, 0.75]
    shown = Console(make_config(), is_on=True)
    for step in (0, 20, 40):
        shown.show_evaluation(step, evaluation(0.5), samples, ["my.match"], LETTERS)
    lines = capsys.readouterr().err.splitlines()
    sample = ["  prompt: question {}", "  response: {}", "  answer: {}", "  reward: match {}"]
    first, second = (0, "a", 0, "0"), (1, "c", 1, "0.5")
    wanted = [[s.format(v) for s, v in zip(sample, of, strict=True)] for of in (first, second)]
    assert [lines[1:5], lines[6:10], lines[11:15]] == [wanted[0], wanted[1], wanted[0]]
    assert [step for step, _ in shown.history.evaluations] == [0, 20, 40]


def test_other_ranks_show_no_phases(capsys):
    for is_on in (False, True):
        with Console(make_config(), is_on).phase("loading the model"):
            pass
    assert capsys.readouterr().err == "loading the model ...\n"


class Screen(io.StringIO):
    """A terminal: what is on its lines in the end."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        shown = []
        for line in self.getvalue().split("\n"):
            text = ""
            for part in line.split("\r"):
                text = part + text[len(part) :]
            shown.append(text.rstrip())
        return shown


def test_lines_do_not_tear_the_bar(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(console, "is_terminal", lambda: True)
    shown = Console(make_config(run__max_steps=2), is_on=True)
    with shown.phase("loading the model"):
        log("a warning")
    shown.end_set_up(0)
    for step in (1, 2):
        shown.show_step(step, DRAFTS | METRICS | {"completions/clipped_ratio": 1.0})
        log(f"line {step}")
    shown.close()
    assert "loading the model ..." in screen.getvalue(), "it was there"
    warning, set_up, hint, *lines, bar, end = screen.lines()
    assert warning == "a warning" and set_up.startswith("set-up took ")
    assert hint.startswith("hint: after 1 step: all responses") and end == ""
    assert lines == ["line 1", "line 2"]
    assert (
        bar.startswith("2/2 steps |") and "reward 0.250, length 38.1, clipped 100%; 4.00 s" in bar
    )
    assert len(bar) <= 100 and "(75%)" not in bar, "there is no room for all"
