"""The real entry point on two ranks, and the same run in this process: what a run leaves behind."""

import json
import os

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bubblespec.metrics import row_of
from scripts import write_metrics
from tests.helpers.clocks import train_in_virtual_time
from tests.helpers.runs import (
    ALWAYS_DRAFT,
    SHORT,
    digests,
    read,
    run,
    same_weights,
    train_here,
    weights,
)
from tests.helpers.threads import train_on_threads

PROMISED = """
reward reward_std frac_reward_zero_std completions/mean_length completions/clipped_ratio grad_norm
entropy loss timing_s/gen timing_s/bubble timing_s/reward timing_s/train timing_s/sync timing_s/step
perf/throughput bubble/ratio bubble/slowest_rank timing_s/gen/rank_1 rewards/exact_match/mean
rewards/exact_match/std critic/rewards/min critic/rewards/max critic/advantages/min
critic/advantages/max completions/min_length prompt_length/mean epoch num_tokens timing_s/elapsed
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    said = run(folder, 2, "speculative.method=none").stderr
    (folder / "screen.txt").write_text(said, encoding="utf-8")
    return folder


def test_run_writes_documented_files(two_ranks):
    lines = read(two_ranks)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(key in line for line in lines for key in PROMISED.split())
    parts = ("gen", "bubble", "reward", "train", "sync")
    for line in lines:
        assert sum(line[f"timing_s/{name}"] for name in parts) <= line["timing_s/step"] + 1e-6
    # Every rank has room for all of its rows: one forward for each token of the longest response,
    # and one before them for its prompt, if other samples of it are on the same rank.
    extra = [line["rollout/forwards"] - line["completions/max_length"] for line in lines]
    assert set(extra) <= {0, 1} and len(set(digests(two_ranks))) == 4
    found = sorted(name for name in os.listdir(two_ranks) if name.startswith("checkpoint"))
    assert found == ["checkpoint-2", "checkpoint-4"]
    assert not same_weights(weights(two_ranks, 2), weights(two_ranks, 4)), "it must have learned"
    # The generator and the training forward are the same weights: their log-probabilities agree to
    # float32 storage.
    assert all(line["sampling/logp_difference/max"] < 1e-5 for line in lines)


def test_a_run_shows_one_line_per_step(two_ranks):
    said = (two_ranks / "screen.txt").read_text(encoding="utf-8")
    assert "\r" not in said and "\033" not in said
    lines = said.splitlines()
    steps = [line for line in lines if " steps: reward " in line]
    assert [line.split(":")[0] for line in steps] == [f"{n}/4 steps" for n in (1, 2, 3, 4)]
    for line, metrics in zip(steps, read(two_ranks), strict=True):
        assert f"reward {metrics['reward']:.3f}, " in line
    for beginning in ("loading the model ...", "model: ", "data: ", "set-up took "):
        assert sum(line.startswith(beginning) for line in lines) == 1, beginning
    output = f"output: {two_ranks}, a new run of 4 steps"
    assert lines.index(output) < lines.index(steps[0])
    after = lines[lines.index(steps[-1]) :]
    assert "saving checkpoint-4 ..." in after and "finished: 4 of 4 steps" in after
    assert f"checkpoint: {two_ranks}/checkpoint-4 (a folder that from_pretrained loads)" in after


def test_every_metric_is_documented(two_ranks, drafted, evaluated):
    lines = [line for folder in (two_ranks, drafted, evaluated) for line in read(folder)]
    written = {key for line in lines for key in line} - {"step"}
    assert len(written) > 70 and {key for key in written if not row_of(key)} == set()
    page = write_metrics.PAGE.read_text(encoding="utf-8")
    assert page == write_metrics.page(), "run python -m scripts.write_metrics"


def test_tokens_epochs_and_time_add_up(two_ranks):
    lines = read(two_ranks)
    tokens = [line["perf/total_num_tokens"] for line in lines]
    assert [line["num_tokens"] for line in lines] == [sum(tokens[: i + 1]) for i in range(4)]
    # 8 prompts per step; 200 prompts, some of which are twice in the data or too long.
    assert [line["epoch"] / lines[0]["epoch"] for line in lines] == pytest.approx([1, 2, 3, 4])
    assert 8 / 200 <= lines[0]["epoch"] < 8 / 150
    elapsed = [line["timing_s/elapsed"] for line in lines]
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] >= sum(line["timing_s/step"] for line in lines)


def test_the_first_and_the_last_step_leave_samples(two_ranks):
    with open(two_ranks / "samples.jsonl", encoding="utf-8") as file:
        samples = [json.loads(line) for line in file]
    assert [sample["step"] for sample in samples] == [1] * 4 + [4] * 4
    assert len({sample["uid"] for sample in samples}) == 8
    for sample in samples:
        assert sample["rewards"] == {"exact_match": sample["reward"]}
        assert isinstance(sample["columns"]["answer"], str) and sample["completion"]


def test_checkpoint_loads_with_transformers(two_ranks):
    folder = os.path.join(two_ranks, "checkpoint-4")
    modes = {entry.name: entry.stat().st_mode for entry in os.scandir(folder)}
    assert set(modes.values()) == {os.stat(os.path.join(two_ranks, "metrics.jsonl")).st_mode}, modes
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config._attn_implementation != "bubblespec"
    prompt = "State the final answer to the following arithmetic problem: 4 + 3 ="
    text = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    reply = model.generate(text["input_ids"], max_new_tokens=20, do_sample=False)
    assert reply.shape[1] > text["input_ids"].shape[1]


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """In virtual time: what is drafted and verified does not depend on the machine."""
    folder = tmp_path_factory.mktemp("drafted")
    options = (
        "speculative.method=bubble+suffix",
        "run.timeline_steps=[1,2,3]",
        f"run.output_dir={folder}",
    )
    train_in_virtual_time(*SHORT, ALWAYS_DRAFT, *options)
    return folder


def test_drafts_are_made_verified_and_accepted(two_ranks, drafted):
    """On one rank, which drafts alongside its own rows: the same tokens in fewer forwards. Losses
    agree to rounding, as summation order differs."""
    lines, plain = read(drafted), read(two_ranks)
    assert digests(drafted) == digests(two_ranks)
    for a, b in zip(lines, plain, strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward"):
            assert a[key] == pytest.approx(b[key], rel=1e-8, abs=1e-10), key
    assert sum(line["bubble/drafted_tokens"] for line in lines[:2]) > 500
    for line, other in zip(lines[2:], plain[2:], strict=True):
        assert line["drafts/aligned/accept_rate"] > 0.8 and line["rollout/spec_accept_length"] > 2
        assert line["rollout/forwards"] < 0.7 * other["rollout/forwards"]
    timelines = sorted((drafted / "timeline").glob("*.json"))
    assert [path.name for path in timelines] == [f"step_{step:05d}.json" for step in (1, 2, 3)]
    events = [json.loads(path.read_text())["traceEvents"] for path in timelines]
    kinds = {event["name"] for of_step in events for event in of_step if event["ph"] == "X"}
    assert {"prefill", "verify drafts", "exchange drafts"} <= kinds
    assert any(kind.startswith("draft") for kind in kinds), kinds


SEVERAL_UPDATES = ["run.max_steps=2", "run.eval_steps=2", "eval.num_prompts=8"]
SEVERAL_UPDATES += ["loss.num_minibatches=2", "loss.num_iterations=2"]
SEVERAL_UPDATES += ["loss.importance_sampling_level=sequence", "loss.advantage_estimator=rloo"]
SEVERAL_UPDATES += ["reward.overlong_buffer_length=48"]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    train_here(folder, *SEVERAL_UPDATES)
    return folder


def test_overlong_penalty_and_iterations_on_any_ranks(tmp_path, evaluated):
    train_on_threads(2, *SHORT, *SEVERAL_UPDATES, f"run.output_dir={tmp_path}")
    assert digests(evaluated) == digests(tmp_path)
    compared = ["loss", "grad_norm", "entropy", "reward"]
    compared += ["clip_ratio/low_mean", "clip_ratio/high_mean"]
    for one, two in zip(read(evaluated), read(tmp_path), strict=True):
        if "eval/reward" in one:
            assert one["eval/reward"] == pytest.approx(one["eval/pass@1"]), "and no penalty"
            continue
        penalty = one["rewards/overlong_penalty/mean"]
        assert penalty == pytest.approx(-one["completions/mean_length"] / 48)
        assert one["reward"] == pytest.approx(one["rewards/exact_match/mean"] + penalty)
        for key in compared:
            assert one[key] == pytest.approx(two[key], rel=1e-6, abs=1e-9), key
