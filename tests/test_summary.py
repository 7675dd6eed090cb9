"""What a run shows on the screen: numbers worked out by hand."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from bubblespec.config import Config
from bubblespec.data.schedule import PromptSet
from bubblespec.distributed.ranks import Ranks
from bubblespec.telemetry import summary
from bubblespec.telemetry.reporter import RunReporter
from bubblespec.telemetry.summary import History, find_hints

METRICS = {"reward": 0.25, "frac_reward_zero_std": 0.5, "completions/mean_length": 38.125}
METRICS |= {"completions/max_length": 400, "completions/clipped_ratio": 0.125, "entropy": 0.5}
METRICS |= {"timing_s/gen": 2.0, "timing_s/bubble": 1.0, "timing_s/reward": 0.125}
METRICS |= {"timing_s/train": 0.5, "timing_s/sync": 0.25, "timing_s/step": 4.0}
METRICS |= {"perf/throughput": 1234.5}
DRAFTS = {"rollout/spec_accept_rate": 0.75, "rollout/spec_accepted_tokens": 3000}
DRAFTS |= {"rollout/spec_wasted_tokens": 1000, "chooser/drafts": -0.4, "chooser/drafts_error": 0.1}


def make_config(**sections) -> Config:
    config = Config()
    config.model.path, config.model.dtype = "my/model", "bfloat16"
    config.run.output_dir, config.run.max_steps = "runs/a", 60
    for key, value in sections.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    return config


def history_of(*steps: dict, **fields) -> History:
    history = History(**fields)
    for metrics in steps:
        history.add(metrics)
    return history


def test_start_names_model_ranks_and_data(monkeypatch):
    hardware = {"gpu": None, "cpu": "Fast 9000", "threads": 1}
    monkeypatch.setattr(summary, "describe_hardware", lambda device: hardware)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 2), torch.nn.Linear(4, 1, bias=False))
    model[0].requires_grad_(False)
    parts = (SimpleNamespace(model=model, kernel="sdpa"), PromptSet([None] * 9872, 3, 5), 128)
    config = make_config(run__eval_steps=5)
    text = summary.start_text(config, Ranks(torch.device("cpu")), *parts)
    assert text.splitlines() == [
        "model: my/model, 2,006 parameters (4 trained), bfloat16; ranks: 1 on CPU (Fast 9000, "
        "threads per rank: 1), sdpa attention",
        "data: 9,872 prompts, 128 held out; left out: 5 equal to these, 3 longer than "
        "rollout.max_prompt_length = 512",
    ]
    hardware["gpu"] = "Card 1"
    other = summary.start_text(make_config(), Ranks(torch.device("cpu")), *parts)
    assert " on Card 1, " in other
    assert other.splitlines()[2:] == [
        "warning: eval.num_prompts: held-out prompts are never evaluated; set run.eval_steps"
    ]


@pytest.mark.parametrize(
    "num_updates, scheduler, ending",
    [
        (0, "cosine", ", a new run of 60 steps"),
        (20, "cosine", ", resuming after 20 of 60 steps from runs/a/checkpoint-20"),
        (60, "constant", "(60 steps); set run.max_steps=120 to continue"),
        (60, "cosine", "; start a new run with model.path=runs/a/checkpoint-60 to continue"),
    ],
)
def test_output_shows_progress_and_how_to_extend(num_updates, scheduler, ending):
    config = make_config(optim__lr_scheduler_type=scheduler)
    checkpoint = f"runs/a/checkpoint-{num_updates}" if num_updates else None
    output, curves = summary.output_text(config, num_updates, checkpoint).splitlines()
    assert output.startswith("output: runs/a, ") and output.endswith(ending)
    assert ("run complete" in output) == (num_updates == 60)
    assert curves == "curves: tensorboard --logdir runs/a/tensorboard"


# Steps and evaluations


@pytest.mark.parametrize(
    "effect, error, text",
    [
        (-0.4, 0.1, ", with drafts a rollout takes about 33% less time"),
        (0.2, 0.05, ", with drafts a rollout takes about 22% more time, so most have none"),
        (-0.4, 0.3, ""),
    ],
)
def test_effect_of_drafts_is_told_once_it_is_clear(effect, error, text):
    """Tokens are those of all steps, the effect that of the last one."""
    metrics = METRICS | DRAFTS | {"chooser/drafts": effect, "chooser/drafts_error": error}
    steps = [METRICS, METRICS | DRAFTS, metrics]
    assert summary.drafts_text(steps) == f"6,000 of 8,000 draft tokens accepted (75%){text}"
    assert summary.drafts_text([*steps, METRICS]).endswith("(75%)")
    assert summary.drafts_text([METRICS]) == ""


def test_drafts_are_told_every_tenth_step(capsys):
    """A line covers the ten steps before it; the last one covers the whole run."""
    fields = dict.fromkeys(RunReporter.__dataclass_fields__)
    fields |= {"config": make_config(run__max_steps=30), "history": History(), "hinted": set()}
    reporter = RunReporter(**fields)
    for step in range(1, 31):
        has_drafts = step not in (15, 16)
        reporter.show_step(step, METRICS | DRAFTS if has_drafts else METRICS)
    said = capsys.readouterr().err.splitlines()
    told = {number: line for number, line in enumerate(said, 1) if " steps: reward" not in line}
    beginning = "drafts of the last 10 steps: "
    assert list(told) == [11, 22] and len(said) == 32
    assert told[11].startswith(f"{beginning}30,000 of 40,000 draft tokens accepted (75%), with")
    assert told[22].startswith(f"{beginning}24,000 of 32,000 ")


def test_step_line_has_times_and_what_is_left():
    """All that fits; the times of a step's parts are the first to be left out."""
    history = history_of(METRICS)
    beginning = "40/60 steps: reward 0.250, length 38.1, clipped 12%; 4.00 s"
    times = ": generate 3.00, train 0.75"
    assert summary.step_text(40, 60, METRICS, history) == f"{beginning}{times}; 0:01:20 left"
    assert summary.step_text(60, 60, METRICS, history).endswith("s" + times)
    waiting = METRICS | {"tail/is_long_round": 0, "tail/num_deferred": 5}
    shown = summary.step_text(40, 60, waiting, history)
    assert shown == f"{beginning}; short round, 5 prompts wait; 0:01:20 left"


@pytest.mark.parametrize("factor", [1, 1000, 10_000])
@pytest.mark.parametrize("more", [{}, {"tail/is_long_round": 0, "tail/num_deferred": 512}])
def test_step_line_has_at_most_110_characters(factor, more):
    large = {key: value * factor for key, value in METRICS.items() if key.startswith("timing")}
    large |= {"reward": -99.999, "divergence": 12.5, "completions/mean_length": 65432.1, **more}
    metrics = METRICS | large
    for step in (1, 99_999, 100_000):
        line = summary.step_text(step, 100_000, metrics, history_of(metrics))
        assert len(line) <= 110 and line.startswith(f"{step}/100000 steps: reward -99.999, ")
        assert ", clipped 12%; " in line


@pytest.mark.parametrize("is_long, text", [(0, "short round, 5 prompts wait"), (1, "long round")])
def test_step_shows_round_of_tail_batching(is_long, text):
    metrics = METRICS | {"tail/is_long_round": is_long, "tail/num_deferred": 5}
    line = summary.step_text(9, 9, metrics, history_of(metrics))
    assert line.split("; ")[-1].startswith(text)


def evaluation(reward: float) -> dict:
    found = {"eval/completions/mean_length": 21.0, "eval/completions/clipped_ratio": 0.0}
    found |= {"eval/reward": reward, "eval/pass@8": 0.75, "eval/own": 0.5, "eval/own/missing": 3}
    return found | {"eval/digest": "a", "eval/forwards": 9, "timing_s/eval": 0.5}


def test_evaluation_and_sample_lines():
    line = summary.evaluation_text(20, evaluation(0.5))
    scores = "reward 0.500, pass@8 0.750, own 0.500, length 21.0, clipped 0% (0.5 s)"
    assert line == f"evaluation after step 20: {scores}"
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 +\n1 ="}]
    rewards = {"match": 1.0, "form": -0.25, "rest": math.nan}
    reply = "\x1b[31mso " + "long " * 100 + "2"
    text = summary.sample_text(prompt, reply, rewards, {"solution": 2})
    prompt_line, response, *rest = text.splitlines()
    assert prompt_line == "  prompt: 1 + 1 ="
    assert response.startswith("  response: [31mso long ") and response.endswith(" long 2")
    assert len(response) <= len("  response: ") + summary.WIDTH and " ... " in response
    assert rest == ["  solution: 2", "  reward: match 1, form -0.25, rest nan"]
    assert summary.sample_text("p", "r", {}, {"level": 1}) == "  prompt: p\n  response: r"


# The end


def end(history: History, seconds: float = 0.0, **run) -> list[str]:
    options = {"num_updates": 60, "checkpoint": "runs/a/checkpoint-60", "is_stopped": False}
    text = summary.end_text(make_config(), history, seconds, *(options | run).values())
    return text.splitlines()


def test_end_compares_first_and_last_steps_and_evaluations():
    """Twenty steps of a resumed run: the first two against the last two."""
    steps = [METRICS | DRAFTS | {"reward": n / 32} for n in range(20)]
    steps[9] = METRICS | {"reward": 9 / 32}
    steps[19]["divergence"] = 2.0
    history = history_of(*steps, set_up_s=10.0)
    history.evaluations = [evaluation(0.5), evaluation(0.625), evaluation(0.75)]
    lines = end(history, 200.0)
    rows = {line[:30].strip(): line[30:].split() for line in lines}
    assert rows["mean of steps"] == ["first", "2", "last", "2"]
    assert rows["reward"] == ["0.016", "0.578"]  # means of 0 and 1, and of 18 and 19, of 32
    assert rows["completions/max_length"] == ["400.000", "400.000"]
    assert rows["perf/throughput"] == ["1,234.500"] * 2
    assert rows["divergence"] == ["-", "2.000"], "only the steps that have it count"
    assert rows["eval/reward"] == ["0.500", "0.750"] and rows["eval/own"] == ["0.500"] * 2
    assert rows["timing_s/eval"] == ["0.500"] * 2 and "grad_norm" not in rows
    facts = {name: text for name, _, text in (line.partition(": ") for line in lines[-5:])}
    assert facts["finished"] == "60 of 60 steps"
    times = re.findall(r"\d+:\d\d:\d\d|\d+\.\d s", facts["time"])
    assert times == ["0:03:20", "10.0 s", "0:01:00", "15.0 s", "0:01:55"]
    for part in ("57,000 of 76,000", "(75%)", "about 33% less time"):
        assert part in facts["drafts"]
    assert facts["checkpoint"].startswith("runs/a/checkpoint-60 ")
    assert facts["metrics"] == "runs/a/metrics.jsonl"


def test_end_of_runs_with_few_steps():
    files = ["metrics: runs/a/metrics.jsonl"]
    assert end(History(), checkpoint=None) == files
    stopped = "stopped after 0 of 60 updates; run the same command to resume"
    assert end(History(), num_updates=0, checkpoint=None, is_stopped=True) == [*files, stopped]
    lines = end(history_of(METRICS), num_updates=1)
    assert "drafts" not in "\n".join(lines) and "troubleshooting.md" not in "\n".join(lines)
    nothing = end(history_of(METRICS | {"reward": 4e-4}))
    assert any("troubleshooting.md" in line for line in nothing)


@pytest.mark.parametrize(
    "seconds, text", [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "0:01:00"), (7260.4, "2:01:00")]
)
def test_durations_from_a_minute_on_are_clock_times(seconds, text):
    assert summary.duration(seconds) == text


# Hints


EQUAL, OTHER = {"frac_reward_zero_std": 1.0}, {"frac_reward_zero_std": 0.99}
CUT, WHOLE = {"completions/clipped_ratio": 1.0}, {"completions/clipped_ratio": 0.99}


@pytest.mark.parametrize(
    "steps, first, part",
    [
        ([EQUAL, EQUAL, OTHER, EQUAL, EQUAL, OTHER], None, ""),
        ([EQUAL, EQUAL, OTHER, *[EQUAL] * 4], 5, "reward.functions"),
        ([WHOLE] * 3, None, ""),
        ([{}, *[CUT] * 3], 1, "rollout.max_completion_length = 512"),
    ],
)
def test_hint_is_given_when_due(steps, first, part):
    """Bad steps in a row count; good ones before do not."""
    history = History()
    for number, metrics in enumerate(steps):
        history.add(METRICS | metrics)
        hints = find_hints(make_config(), history)
        assert (len(hints) > 0) == (first is not None and number >= first)
        assert all(part in hint for hint in hints.values())


def test_batch_estimators_need_no_differing_rewards():
    config = make_config(loss__advantage_estimator="reinforce_plus_plus")
    assert find_hints(config, history_of(*[METRICS | EQUAL] * 3)) == {}
