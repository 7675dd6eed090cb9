"""What a run shows: lines made of numbers by hand, and a bar that no line tears."""

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
from bubblespec.telemetry.console import Console, Hints
from bubblespec.telemetry.summary import Facts
from bubblespec.telemetry.totals import Totals
from bubblespec.types import Group, Prompt
from tests.helpers.rows import samples_of

METRICS = {
    "reward": 0.25,
    "frac_reward_zero_std": 0.5,
    "completions/mean_length": 38.125,
    "completions/max_length": 400,
    "completions/clipped_ratio": 0.125,
    "entropy": 0.5,
    "timing_s/gen": 2.0,
    "timing_s/bubble": 1.0,
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
FACTS = Facts(
    num_ranks=4,
    hardware={"gpu": None, "cpu": "Fast 9000", "threads": 1, "cores": 8},
    kernel="sdpa",
    num_parameters=1_540_000_000,
    num_trained=1_540_000_000,
    num_prompts=9872,
    num_held_out=128,
    num_dropped=0,
    num_updates=0,
    checkpoint=None,
    num_deferred=0,
)


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


def test_the_start_of_a_new_run():
    assert summary.start_lines(make_config(), FACTS) == [
        "model: my/model, 1.54 B parameters, bfloat16",
        "ranks: 4 on CPU (Fast 9000, 1 thread per rank), sdpa attention",
        "step: 10 prompts x 3 responses of up to 512 tokens; 7.5 responses per rank",
        "data: 9,872 prompts from problems.jsonl, 128 held out; none dropped as longer than "
        "rollout.max_prompt_length = 512",
        "drafts: generated ahead in idle time (bubble), matched in earlier text (suffix)",
        "output: runs/a, a new run of 60 steps",
        "TensorBoard: tensorboard --logdir runs/a/tensorboard",
    ]


def test_the_start_of_other_runs():
    tasks = [TaskConfig(name="chain_sum"), TaskConfig(name="gcd"), TaskConfig(name="chain_sum")]
    config = make_config(data__tasks=tasks, speculative__method="none", tail_batching__enabled=True)
    hardware = FACTS.hardware | {"gpu": "Card 1"}
    facts = replace(FACTS, hardware=hardware, num_trained=8_000_000, num_dropped=3)
    said = summary.start_lines(config, facts)
    assert "model: my/model, 1.54 B parameters, 8 M of them trained, bfloat16" in said
    assert "ranks: 4 on Card 1, sdpa attention" in said
    assert any("from reasoning-gym (chain_sum, gcd), 128 held out; 3 dropped" in s for s in said)
    assert "drafts: none (speculative.method=none)" in said
    assert sum(line.startswith("tail batching: ") for line in said) == 1


@pytest.mark.parametrize(
    "num_updates, scheduler, said",
    [
        (20, "cosine", "resuming after 20 of 60 steps from runs/a/checkpoint-20"),
        (60, "constant", "set run.max_steps=120 to continue"),
        (60, "cosine", "start a new run with model.path=runs/a/checkpoint-60"),
    ],
)
def test_a_resumed_run_says_where_it_is_and_how_it_is_extended(num_updates, scheduler, said):
    config = make_config(optim__lr_scheduler_type=scheduler)
    checkpoint = f"runs/a/checkpoint-{num_updates}"
    facts = replace(FACTS, num_updates=num_updates, checkpoint=checkpoint)
    (line,) = [s for s in summary.start_lines(config, facts) if s.startswith("output: ")]
    assert line.endswith(said)
    assert ("run complete (60 steps)" in line) == (num_updates == 60)


# Steps and evaluations


def without_drafts(ratio: float) -> dict:
    """A step that is compared with those that have drafts. ratio: measured over modelled
    seconds."""
    return METRICS | {"rollout/modelled_s": 3.0 / ratio, "guard/is_on": 1}


def test_a_step_in_words():
    """Of the model's error three steps without drafts say 1.5 in the median: the two with drafts,
    modelled as 4 s each, would have taken 6 s."""
    totals, metrics = Totals(), METRICS | DRAFTS
    totals.add(metrics)
    assert summary.step_text(metrics, totals, 0.0).endswith("; 3,000 draft tokens accepted (75%)")
    for ratio in (9.0, 1.5, 1.0):
        totals.is_without = True
        totals.add(without_drafts(ratio))
    totals.add(metrics)
    assert summary.step_text(metrics, totals, 83.0) == (
        "reward 0.250, length 38.1, clipped 12%; 1 min 23 s left; 4.00 s (generate 3.00, "
        "train 0.75, rest 0.25); 3,000 draft tokens accepted (75%), 6.0 s saved so far"
    )
    last = summary.step_text(METRICS, Totals(), 0.0)
    assert "left" not in last and "draft" not in last and last.endswith("rest 0.25)")


def test_tail_batching_in_words():
    """Three short rounds, the second of which defers nothing, and a long one; two prompts were
    waiting before."""
    rounds = [(0, 5), (0, 5), (0, 12), (1, 2)]
    totals, said = Totals(num_waiting=2), []
    for is_long, waiting in rounds:
        metrics = METRICS | {"tail/is_long_round": is_long, "tail/num_deferred": waiting}
        totals.add(metrics)
        said.append(summary.step_text(metrics, totals, 0.0).rpartition("; ")[2])
    assert said[1] == "short round, 5 prompts wait for a long one" and said[3] == "long round"
    assert summary.deferred_text(totals) == (
        "10 prompts deferred in 3 short rounds, 1 long round; prompts still waiting: 2"
    )
    nothing = Totals()
    nothing.add(METRICS | {"tail/is_long_round": 0, "tail/num_deferred": 0})
    assert summary.deferred_text(nothing).startswith("no prompt was deferred in 1 short round:")


def evaluation(reward: float) -> dict:
    return {
        "eval/reward": reward,
        "eval/pass@1": reward,
        "eval/pass@8": 0.75,
        "eval/pass@16": 0.875,
        "eval/completions/mean_length": 21.0,
        "eval/completions/clipped_ratio": 0.0,
        "eval/reward/errors": 0,
        "eval/digest": "abc",
        "timing_s/eval": 0.5,
    }


def test_an_evaluation_and_a_sample_in_words():
    assert summary.evaluation_line(20, evaluation(0.5)) == (
        "evaluation after 20 steps: held-out reward 0.500, pass@16 0.875, length 21.0, clipped 0% "
        "(0.5 s)"
    )
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


def end(config: Config, totals: Totals, history: list, evaluations=(), **run) -> list[str]:
    history = [{key: metrics.get(key) for key in summary.KEPT} for metrics in history]
    options = {"num_updates": 60, "checkpoint": "runs/a/checkpoint-60", "is_stopped": False}
    return summary.end_lines(config, totals, history, list(evaluations), **options | run)


def test_the_end_of_a_run():
    """Twenty steps of a run that was resumed: the first two against the last two."""
    history = [METRICS | DRAFTS | {"reward": n / 32, "entropy": 4e-4} for n in range(20)]
    totals = Totals(seconds=200.0, set_up_s=10.0)
    history[9] = without_drafts(2.0) | {"reward": 9 / 32, "entropy": 0.0}
    history[8] = history[8] | {"guard/is_on": 0}
    for metrics in history:
        totals.add(metrics)
    said = end(make_config(), totals, history, [(0, evaluation(0.5)), (60, evaluation(0.75))])
    rows = {line[:28].strip(): line[28:].split() for line in said if line[28:].strip()}
    assert re.fullmatch(r" {28,}steps 41-42 +steps 59-60", said[0])
    assert rows["reward"] == ["0.016", "0.578"]  # means of 0 and 1, and of 18 and 19, of 32
    assert rows["longest response"] == ["400", "400"]
    assert rows["groups of equal rewards"] == ["50%", "50%"]
    assert rows["held-out reward"] == ["0.500", "0.750"] and rows["pass@16"] == ["0.875"] * 2
    assert not {"entropy", "rewards that failed", "pass@1"} & rows.keys(), "they are 0, or double"
    assert said[said.index("") + 1].split() == ["after", "0", "after", "60"]
    assert said[-6:] == [
        "finished: 60 of 60 steps",
        "time: 3 min 20 s for 20 steps: set-up 10 s, generate 1 min 0 s, train 15 s, evaluations, "
        "saves and all else 1 min 55 s",
        "drafts: 57,000 of 76,000 draft tokens accepted (75%); about 1 min 35 s of generation "
        "saved, compared with 1 step without drafts",
        "checkpoint: runs/a/checkpoint-60 (a folder that from_pretrained loads)",
        "metrics: runs/a/metrics.jsonl",
        "TensorBoard: tensorboard --logdir runs/a/tensorboard",
    ]


def test_the_end_of_runs_that_did_nothing_or_little():
    files = [
        "metrics: runs/a/metrics.jsonl",
        "TensorBoard: tensorboard --logdir runs/a/tensorboard",
    ]
    assert end(make_config(), Totals(), [], checkpoint=None) == files
    options = {"num_updates": 0, "checkpoint": None, "is_stopped": True}
    told = "stopped after 0 of 60 updates; run the same command to resume"
    assert end(make_config(), Totals(), [], **options) == [told, *files]
    totals = Totals()
    totals.add(METRICS)
    said = end(make_config(), totals, [METRICS], num_updates=1)
    assert said[0].split() == ["step", "1"] and "drafts: none were verified" in said
    totals.draft_tokens, totals.without_drafts = 10, [0.5]
    totals.measured_s, totals.modelled_s = 3.0, 2.0
    lost = "(0%); about 2.0 s of generation lost, compared with 1 step without drafts"
    assert summary.drafted_text(totals).endswith(lost)


def test_the_learned_drafter_in_words():
    accepted = {"drafter/accepted_1": 0.46, "drafter/accepted_2": 0.24, "drafter/accepted_3": 0.12}
    config, totals = make_config(speculative__method="drafter"), Totals()
    totals.add(METRICS)
    wanted = "of its drafts 46% have the first token right, 24% the first two, 12% the first three"
    assert f"learned drafter: {wanted}" in end(config, totals, [METRICS | accepted])
    assert not any("drafter" in line for line in end(config, totals, [METRICS]))


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0.000"),
        (1e-6, "0.000"),
        (0.4687, "0.469"),
        (-1.5, "-1.50"),
        (38.125, "38.1"),
        (120, "120"),
        (1234.56, "1,235"),
        (23.0, "23.0"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_numbers_have_about_three_digits(value, text):
    assert summary.compact(value) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (7260, "2 h 1 min"),
        (49 * 3600, "2 d 1 h"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert summary.duration(seconds) == text


# Hints


def hints_of(steps: list[dict], config: Config | None = None) -> list[tuple[int, str]]:
    """(step, line) of all hints in a run of such steps."""
    hints = Hints(config or make_config())
    found = [(step, hints.find(step, METRICS | metrics)) for step, metrics in enumerate(steps)]
    return [(step, line) for step, lines in found for line in lines]


def test_equal_rewards_in_three_steps_in_a_row_are_a_hint_once():
    equal, other = {"frac_reward_zero_std": 1.0}, {"frac_reward_zero_std": 0.99}
    assert hints_of([equal, equal, other, equal, equal, other]) == []
    ((step, line),) = hints_of([equal] * 2 + [other] + [equal] * 4 + [other] + [equal] * 4)
    assert step == 5 and line.startswith("hint: after 6 steps: ") and "reward.functions" in line


def test_responses_that_are_all_cut_off_are_a_hint_once():
    assert hints_of([{"completions/clipped_ratio": 0.99}] * 3) == []
    ((step, line),) = hints_of([{}, *[{"completions/clipped_ratio": 1.0}] * 3])
    assert step == 1 and "rollout.max_completion_length = 512" in line


def test_drafts_that_are_hardly_ever_accepted_are_a_hint_once():
    """Of the latest 2,000 tokens; good ones before do not count."""

    def drafts(accepted: int, wasted: int) -> dict:
        names = ("rollout/spec_accepted_tokens", "rollout/spec_wasted_tokens")
        return dict(zip(names, (accepted, wasted), strict=True))

    assert hints_of([drafts(100, 1900)] * 3 + [drafts(0, 1999)]) == []
    ((step, line),) = hints_of([drafts(2000, 0), drafts(0, 1000), *[drafts(99, 901)] * 6])
    assert step == 2 and "5.0% of the latest 2,000 draft tokens" in line
    assert "speculative.method=none" in line


# The screen


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_each_evaluation_shows_another_prompt(capsys):
    groups = [Group(Prompt(u, f"question {u}", (1,), {"answer": u}), 0) for u in range(2)]
    samples = samples_of(groups, [np.array([i], np.int32) for i in range(4)])
    samples.rewards[:, 0] = [0.0, 0.25, 0.5, 0.75]
    shown = Console(make_config(), is_on=True)
    for step in (0, 20, 40):
        shown.show_evaluation(step, evaluation(0.5), samples, ["my.match"], Letters())
    lines = capsys.readouterr().err.splitlines()
    sample = ["  prompt: question {}", "  response: {}", "  answer: {}", "  reward: match {}"]
    first, second = (0, "a", 0, "0"), (1, "c", 1, "0.5")
    wanted = [[s.format(v) for s, v in zip(sample, of, strict=True)] for of in (first, second)]
    assert [lines[1:5], lines[6:10], lines[11:15]] == [wanted[0], wanted[1], wanted[0]]
    assert [step for step, _ in shown.evaluations] == [0, 20, 40]


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
    for step in range(2):
        shown.show_step(step, METRICS | {"completions/clipped_ratio": 1.0})
        log(f"line {step}")
    shown.close()
    assert "loading the model ..." in screen.getvalue(), "it was there"
    warning, set_up, hint, *lines, bar, end = screen.lines()
    assert warning == "a warning" and set_up.startswith("set-up took ")
    assert hint.startswith("hint: after 1 step: all responses") and end == ""
    assert lines == ["line 0", "line 1"]
    assert bar.startswith("2/2 steps |") and "reward 0.250, length 38.1, clipped 100%" in bar
