"""The real entry point, with real ranks: digests under every schedule, kill and resume, bad input.

Runs are a few steps of the tiny workload, in float64 where tokens must be equal.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHORT = [
    "rollout.num_prompts_per_step=8",
    "rollout.num_generations=4",
    "rollout.max_completion_length=48",
    "data.size=200",
    "run.max_steps=4",
    "run.eval_steps=0",
    "run.save_steps=2",
    "model.dtype=float64",
]


# Whatever a forward takes on this machine: without it measured times decide whether anything is drafted.
ALWAYS_DRAFT = "bubble.max_slowdown=1000.0"


def command(output_dir, ranks: int, *overrides: str, config: str = "configs/tiny_cpu.yaml", short=SHORT) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=0"]
    launch = [sys.executable] if ranks == 0 else [*launcher, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    options = [*short, f"run.output_dir={output_dir}", *overrides]
    return [*launch, "train.py", "--config", config, *options]


def run(output_dir, ranks: int, *overrides: str, check: bool = True, **changes) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command(output_dir, ranks, *overrides, **changes), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


def read(output_dir) -> list[dict]:
    with open(os.path.join(output_dir, "metrics.jsonl"), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def digests(output_dir) -> list[str]:
    return [line["rollout/digest"] for line in read(output_dir) if "rollout/digest" in line]


def weights(output_dir, step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(os.path.join(output_dir, f"checkpoint-{step}", "model.safetensors"))


def same_weights(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


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
    # Every rank has room for all of its rows: a forward for the prompts, and one for each token of the longest response.
    assert all(line["rollout/forwards"] == line["completions/max_length"] + 1 for line in lines)
    assert len(set(digests(two_ranks))) == 4
    assert sorted(name for name in os.listdir(two_ranks) if name.startswith("checkpoint")) == ["checkpoint-2", "checkpoint-4"]
    assert not same_weights(weights(two_ranks, 2), weights(two_ranks, 4)), "the policy must have learned something"
    # The generator and the training forward are the same weights: their log-probabilities agree to float32 storage.
    assert all(line["sampling/logp_difference/max"] < 1e-5 for line in lines)


def test_checkpoint_loads_with_transformers(two_ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = os.path.join(two_ranks, "checkpoint-4")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config._attn_implementation != "bubblespec"
    text = tokenizer("State the final answer to the following arithmetic problem: 4 + 3 =", return_tensors="pt")
    reply = model.generate(text["input_ids"], max_new_tokens=20, do_sample=False)
    assert reply.shape[1] > text["input_ids"].shape[1]


@pytest.mark.parametrize("ranks", [0, 1, 4])
def test_rank_count_leaves_digests_unchanged(two_ranks, tmp_path, ranks):
    """0 is a plain `python train.py`. Losses and gradients agree to rounding, as summation order differs."""
    run(tmp_path, ranks)
    assert digests(tmp_path) == digests(two_ranks)
    for a, b in zip(read(tmp_path), read(two_ranks), strict=True):
        for key in ("loss", "grad_norm", "entropy", "reward"):
            assert a[key] == pytest.approx(b[key], rel=1e-8, abs=1e-10), key


def test_schedule_leaves_digests_and_weights_unchanged(two_ranks, tmp_path):
    """Few slots and a small token budget: another order of admission, other batches, the same bits."""
    run(tmp_path, 2, "speculative.method=none", "rollout.num_slots=3", "rollout.max_batch_tokens=5")
    assert digests(tmp_path) == digests(two_ranks)
    assert same_weights(weights(tmp_path), weights(two_ranks))


@pytest.mark.parametrize(
    "ranks, overrides",
    [
        (2, ["speculative.method=bubble+suffix", ALWAYS_DRAFT]),
        (4, ["speculative.method=bubble+suffix", "bubble.lookahead=2", "bubble.order=own", "rollout.num_slots=5", ALWAYS_DRAFT]),
        (0, ["speculative.method=bubble", ALWAYS_DRAFT]),
        (2, ["speculative.method=suffix", "speculative.fixed_window=4"]),
    ],
)
def test_speculation_leaves_digests_and_weights_unchanged(two_ranks, tmp_path, ranks, overrides):
    """Drafts made ahead by any rank, matched or not, in windows planned or fixed: the same tokens, in fewer forwards."""
    run(tmp_path, ranks, *overrides)
    assert digests(tmp_path) == digests(two_ranks)
    if ranks == 2:
        assert same_weights(weights(tmp_path), weights(two_ranks))
    lines = read(tmp_path)
    assert sum(line["rollout/spec_accept_length"] for line in lines) > len(lines)
    if "speculative.method=suffix" not in overrides:
        assert sum(line["bubble/drafted_tokens"] for line in lines) > 0
        assert any(line.get("drafts/aligned/accept_rate", 0) > 0.5 for line in lines)


@pytest.mark.parametrize("method", ["none", "bubble+suffix"])
def test_kill_and_resume_continues_exactly(two_ranks, tmp_path, method):
    """SIGKILL to the whole process group in the middle, after a checkpoint and a step beyond it."""
    process = subprocess.Popen(
        command(tmp_path, 2, f"speculative.method={method}"),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and '"step": 2' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with open(metrics, "a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')  # a torn line, as a kill may leave
    run(tmp_path, 2, f"speculative.method={method}")
    assert digests(tmp_path) == digests(two_ranks)
    assert same_weights(weights(tmp_path), weights(two_ranks))


def test_resume_refuses_another_configuration(two_ranks):
    done = run(two_ranks, 0, "optim.learning_rate=0.5", check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: optim.learning_rate: 0.5 here, but")
    done = run(two_ranks, 0, "run.resume_from_checkpoint=none", check=False)
    assert done.returncode == 2 and "run.output_dir" in done.stderr
    assert len(digests(two_ranks)) == 4


@pytest.mark.parametrize(
    "override, says",
    [
        ("rollout.max_prompt_length=2000", "beyond the model's 1024 positions"),
        ("model.path=/nowhere", "model.path: cannot load"),
        ("reward.functions=[math.nothing]", "reward.functions: cannot import 'math.nothing'"),
        ("rollout.num_prompts_per_step=500", "data.size: 200 must be at least rollout.num_prompts_per_step = 500"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, override, says):
    overrides = [override, "optim.max_tokens_per_microbatch=10000"]
    done = run(tmp_path / "out", 0, *overrides, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(errors) == 1 and says in errors[0] and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_several_updates_of_a_batch_with_an_overlong_penalty_on_any_number_of_ranks(tmp_path):
    """Four updates a step, whose reward is the function's and the penalty; evaluation is not penalised."""
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
        (plain,) = [v for k, v in one.items() if k.startswith("rewards/") and k != "rewards/overlong_penalty/mean"]
        assert one["rewards/overlong_penalty/mean"] == pytest.approx(-10 * one["completions/mean_length"] / 48)
        assert one["reward"] == pytest.approx(plain + one["rewards/overlong_penalty/mean"])
        for key in ("loss", "grad_norm", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "reward"):
            assert one[key] == pytest.approx(two[key], rel=1e-6, abs=1e-9), key
    for line in lines[0]:
        if "eval/reward" in line:
            assert line["eval/reward"] == pytest.approx(line["eval/pass@1"]) and line["eval/reward"] >= 0
