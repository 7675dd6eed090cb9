"""The real entry point, with real ranks: digests under every schedule, kill and resume, bad input.

Runs are a few steps of the tiny workload, in float64 where tokens must be equal.
"""

import json
import os

import pytest

from tests.helpers.clocks import train_in_virtual_time
from tests.helpers.runs import (
    ALWAYS_DRAFT,
    SHORT,
    digests,
    read,
    run,
    run_until_killed,
    same_weights,
    weights,
)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """An uninterrupted run on two ranks, which the other runs are compared with."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run(folder, 2, "speculative.method=none")
    return folder


def test_a_run_leaves_what_it_promises(two_ranks):
    lines = read(two_ranks)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    wanted = "reward reward_std frac_reward_zero_std completions/mean_length completions/clipped_ratio grad_norm entropy loss"
    wanted += " timing_s/gen timing_s/bubble timing_s/reward timing_s/train timing_s/sync timing_s/step perf/throughput"
    wanted += " bubble/ratio bubble/slowest_rank timing_s/gen/rank_1 rewards/exact_match/mean clip_ratio/region_mean"
    assert all(key in line for line in lines for key in wanted.split())
    # Every rank has room for all of its rows: one forward for each token of the longest response,
    # and one before them for its prompt, if other samples of it are on the same rank.
    assert all(
        line["rollout/forwards"] - line["completions/max_length"] in (0, 1) for line in lines
    )
    assert len(set(digests(two_ranks))) == 4
    assert sorted(name for name in os.listdir(two_ranks) if name.startswith("checkpoint")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert not same_weights(weights(two_ranks, 2), weights(two_ranks, 4)), (
        "the policy must have learned something"
    )
    # The generator and the training forward are the same weights: their log-probabilities agree to
    # float32 storage.
    assert all(line["sampling/logp_difference/max"] < 1e-5 for line in lines)


def test_checkpoint_loads_with_transformers(two_ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = os.path.join(two_ranks, "checkpoint-4")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert model.config._attn_implementation != "bubblespec"
    text = tokenizer(
        "State the final answer to the following arithmetic problem: 4 + 3 =", return_tensors="pt"
    )
    reply = model.generate(text["input_ids"], max_new_tokens=20, do_sample=False)
    assert reply.shape[1] > text["input_ids"].shape[1]


def test_a_run_without_a_launcher_is_that_of_two_ranks(two_ranks, tmp_path):
    """`python train.py`. Losses and gradients agree to rounding, as summation order differs."""
    run(tmp_path, 0)
    assert digests(tmp_path) == digests(two_ranks)
    for a, b in zip(read(tmp_path), read(two_ranks), strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward"):
            assert a[key] == pytest.approx(b[key], rel=1e-8, abs=1e-10), key


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """A run that drafts ahead, in virtual time: how much is drafted and verified does not depend on
    the machine."""
    folder = tmp_path_factory.mktemp("drafted")
    options = (
        "speculative.method=bubble+suffix",
        "run.timeline_steps=[0,1,2]",
        f"run.output_dir={folder}",
    )
    train_in_virtual_time(*SHORT, ALWAYS_DRAFT, *options)
    return folder


def test_drafts_are_made_verified_and_accepted(two_ranks, drafted):
    """On one rank, which drafts beside its own rows: the same tokens in fewer forwards."""
    lines, plain = read(drafted), read(two_ranks)
    assert digests(drafted) == digests(two_ranks)
    assert sum(line["bubble/drafted_tokens"] for line in lines[:2]) > 500
    for line, other in zip(lines[2:], plain[2:], strict=True):
        assert line["drafts/aligned/accept_rate"] > 0.8 and line["rollout/spec_accept_length"] > 2
        assert line["rollout/forwards"] < 0.7 * other["rollout/forwards"]
    kinds = set()
    assert {path.stem for path in (drafted / "timeline").iterdir()} == {
        f"step_{step:05d}" for step in range(3)
    }, "of 4 steps"
    for step in range(3):
        found = json.loads(
            (drafted / "timeline" / f"step_{step:05d}.json").read_text(encoding="utf-8")
        )
        kinds |= {event["name"] for event in found["traceEvents"] if event["ph"] == "X"}
    assert {"prefill", "verify", "draft soft", "exchange"} <= kinds


def test_kill_and_resume_continues_exactly(two_ranks, tmp_path):
    """SIGKILL to all ranks in the middle, after a checkpoint and a step beyond it, and a torn line
    of metrics."""
    run_until_killed(tmp_path, 2, 3, "speculative.method=bubble+suffix")
    assert len(read(tmp_path)) == 3 and (tmp_path / "checkpoint-2").is_dir()
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')  # a torn line, as a kill may leave
    run(tmp_path, 2, "speculative.method=bubble+suffix")
    assert digests(tmp_path) == digests(two_ranks)
    assert same_weights(weights(tmp_path), weights(two_ranks))


def test_resume_refuses_another_configuration(two_ranks):
    done = run(two_ranks, 0, "optim.learning_rate=0.5", check=False)
    assert done.returncode == 2
    assert (
        done.stderr.strip().splitlines()[-1].startswith("error: optim.learning_rate: 0.5 here, but")
    )
    done = run(two_ranks, 0, "run.resume_from_checkpoint=none", check=False)
    assert done.returncode == 2 and "run.output_dir" in done.stderr
    assert len(digests(two_ranks)) == 4


@pytest.mark.parametrize(
    "override, says",
    [
        ("rollout.max_prompt_length=2000", "beyond the model's 1024 positions"),
        ("model.path=/nowhere", "model.path: cannot load"),
        ("reward.functions=[math.nothing]", "reward.functions: cannot import 'math.nothing'"),
        (
            "rollout.num_prompts_per_step=500",
            "data.size: 200 must be at least rollout.num_prompts_per_step = 500",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, override, says):
    overrides = [override, "optim.max_tokens_per_microbatch=10000"]
    done = run(tmp_path / "out", 0, *overrides, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        done.returncode == 2
        and len(errors) == 1
        and says in errors[0]
        and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "out").exists()


def test_several_updates_of_a_batch_with_an_overlong_penalty_on_any_number_of_ranks(tmp_path):
    """Four updates a step, whose reward is the function's and the penalty; evaluation is not
    penalised."""
    options = [
        "run.max_steps=2",
        "run.eval_steps=2",
        "eval.num_prompts=8",
        "loss.num_minibatches=2",
        "loss.num_iterations=2",
        "loss.importance_sampling_level=sequence",
        "loss.advantage_estimator=rloo",
        "reward.overlong_buffer_length=48",
        "reward.overlong_penalty_factor=10.0",
    ]
    lines = {}
    for ranks in (0, 2):
        run(tmp_path / str(ranks), ranks, *options)
        lines[ranks] = read(tmp_path / str(ranks))
    assert digests(tmp_path / "0") == digests(tmp_path / "2")
    steps = [[line for line in lines[ranks] if "loss" in line] for ranks in (0, 2)]
    for one, two in zip(*steps, strict=True):
        (plain,) = [
            v
            for k, v in one.items()
            if k.startswith("rewards/") and k != "rewards/overlong_penalty/mean"
        ]
        assert one["rewards/overlong_penalty/mean"] == pytest.approx(
            -10 * one["completions/mean_length"] / 48
        )
        assert one["reward"] == pytest.approx(plain + one["rewards/overlong_penalty/mean"])
        for key in (
            "loss",
            "grad_norm",
            "entropy",
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "reward",
        ):
            assert one[key] == pytest.approx(two[key], rel=1e-6, abs=1e-9), key
    for line in lines[0]:
        if "eval/reward" in line:
            assert (
                line["eval/reward"] == pytest.approx(line["eval/pass@1"])
                and line["eval/reward"] >= 0
            )
