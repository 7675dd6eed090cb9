"""Parts of the GPU suite that run whole programs (tests, doctor, training); updates."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from benchmarks import shared
from benchmarks.gpu_bench import SHAPES, Bench, Figure, left_out
from benchmarks.gpu_forwards import KINDS, kernels_of, time_by_kind
from benchmarks.paired_rollout import FITTED, fit, paired_steps
from benchmarks.shared import ROOT
from bubblespec import loading
from bubblespec.config import Config, LossConfig, ModelConfig, OptimConfig, RolloutConfig
from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.batch import SamplingParams
from bubblespec.learn.learner import Learner
from bubblespec.learn.optimizer import Optimizer
from bubblespec.memory import gradient_peak
from bubblespec.records import Samples
from bubblespec.tools.simulate.roofline import OWN, update_tokens_per_s
from bubblespec.types import Group, Prompt

UPDATE_KINDS = {
    "attention": KINDS["attention"],
    "gradients and masters": ("_moved",),
    "logits": ("_head_",),
    "operations of layers": ("_add_norm", "_rotate", "_gated"),
    "optimizer": ("adam",),
    **{kind: KINDS[kind] for kind in ("products", "copies")},
}
# Of the update below on an H200, when torch's kernels did what Triton's do now; 108 of others.
BEFORE_MS = {"gradients and masters": 157, "logits": 150, "operations of layers": 116}
BEFORE_MS |= {"attention": 169, "products": 550}

FIRST = "test_triton_ops"
LEAVE_S = 10.0  # in which a program that has no time left may end
CONFIG, SMOLLM2_CONFIG = "configs/tiny_cpu.yaml", "configs/smollm2_135m_cpu.yaml"
SMOLLM2, HUB_NAME = "models/smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"
NEEDED = ("omegaconf", "datasets", "reasoning_gym", "psutil", "accelerate")  # by train.py
NO_EVALUATION = ["eval.num_prompts=0", "run.eval_steps=0"]
LAUNCHER = ("-m", "torch.distributed.run", "--standalone")
ON_GPU = ["model.device=cuda", "model.dtype=bfloat16"]
LARGE_ROLLOUT = (
    *ON_GPU,
    "rollout.num_prompts_per_step=16",
    "rollout.num_generations=8",
    "rollout.max_completion_length=512",
    "rollout.max_num_seqs=128",
    "rollout.max_num_batched_tokens=2048",
    "optim.max_tokens_per_microbatch=4096",  # on 24 GB
)
SMALL_ROLLOUT = ("rollout.num_prompts_per_step=2", "rollout.max_completion_length=16")


def run_program(bench: Bench, *arguments: str) -> tuple[subprocess.CompletedProcess, float]:
    """Return what `python arguments` printed, and its seconds. Raises TimeoutExpired."""
    started = time.perf_counter()
    limit_s = max(min(bench.left_s, threading.TIMEOUT_MAX), 1.0)
    command, pipe = [sys.executable, *arguments], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output = process.communicate(timeout=limit_s)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LEAVE_S)
                process.kill()
    got = subprocess.CompletedProcess(command, process.returncode, *output)
    return got, time.perf_counter() - started


def gpu_test_files() -> list[str]:
    """Return the files with tests marked gpu, parity of kernels first."""
    files = sorted(Path(ROOT, "tests").glob("test_*.py"), key=lambda f: (f.stem != FIRST, f.stem))
    marks = re.compile(r"mark\.gpu|import .*\bpytestmark as pytestmark")
    return [str(f) for f in files if marks.search(f.read_text()) and "gpu" not in f.stem]


def gpu_tests(bench: Bench) -> Iterator[Figure]:
    """Run the tests marked gpu, the parity of kernels first; keep what is known if time ends."""
    options = ("-v", "--tb=line", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist")
    started, problem, kind = time.perf_counter(), None, RuntimeError
    try:
        got, _ = run_program(bench, "-m", "pytest", *options, *gpu_test_files())
        output, code = got.stdout or got.stderr, got.returncode
        if code:
            problem = f"pytest ended with exit code {code}"
    except subprocess.TimeoutExpired as error:
        output, kind = (error.stdout or b"").decode(errors="replace"), TimeoutError
        problem = "pytest had no time left"
    lines = (output.strip() or "nothing printed").splitlines()
    seconds, num_passed = time.perf_counter() - started, sum(" PASSED" in line for line in lines)
    note = lines[-1].strip("= ") if problem is None else f"{num_passed} passed"
    yield Figure("pytest -m gpu", seconds, "s", note)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")) or line.split(" [")[0].endswith("FAILED"):
            yield Figure(line[:100], None, note=line[100:300])
    if problem:
        raise kind(problem)


def paired(bench: Bench) -> Iterator[Figure]:
    """Roll out steps without and with drafts: of SmolLM2, where it is, and of random weights."""
    if lacks := lacking():
        yield left_out("paired rollouts", f"needs {lacks}")
        return
    cases: dict[str, tuple[str, list[str]]] = {}
    path = None if bench.is_small else smollm2_path()
    if path:
        cases["SmolLM2-135M"] = SMOLLM2_CONFIG, [f"model.path={path}", "run.max_steps=30"]
    policy = os.path.join(ROOT, "configs/tiny_policy")
    for name in [bench.policy] if path or bench.is_small else ["SmolLM2-135M", bench.policy]:
        keys = shared.random_policy(policy, SHAPES[name][3])
        keys += ["optim.learning_rate=1e-6", f"run.max_steps={2 if bench.is_small else 10}"]
        cases[f"{name}, random weights"] = CONFIG, keys
    for number, (name, (path, keys)) in enumerate(cases.items()):
        end_s = time.perf_counter() + bench.left_s / (len(cases) - number)
        steps = []
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            sizes = bench.sizes(SMALL_ROLLOUT, LARGE_ROLLOUT)
            overrides = [f"run.output_dir={folder}", *NO_EVALUATION, *sizes, *keys]
            overrides += bench.overrides
            config = load_config(os.path.join(ROOT, path), overrides)
            if path == CONFIG:  # the tokenizer is the tiny policy's
                make = partial(random_model, bench, name.split(",")[0])
                stack.enter_context(patch.object(loading, "load_model", make))
            trainer = stack.enter_context(shared.open_trainer(config))
            for step in paired_steps(trainer):
                steps.append(step)
                yield paired_figure(f"{name}, step {step['step']}", step)
                if time.perf_counter() > end_s:
                    break
        if fitted := fit(steps):
            note = FITTED.format_map(fitted)
            yield Figure(f"{name}, a forward", fitted["forward"], "ms, fitted", note)


def random_model(bench: Bench, name: str, *_) -> PreTrainedModel:
    """Make a model in place of loading one."""
    return bench.raw_model(name)


def smollm2_path() -> str | None:
    """Return the folder of SmolLM2-135M: fetched by `make smollm2`, or from the hub or its cache.

    None if neither has it."""
    if os.path.isdir(folder := os.path.join(ROOT, SMOLLM2)):
        return folder
    try:
        files = ["*.json", "*.txt", "model.safetensors"]
        return snapshot_download(HUB_NAME, allow_patterns=files, etag_timeout=5.0)
    except Exception:  # by version of the hub's client and by the network
        return None


def paired_figure(case: str, step: dict) -> Figure:
    """Return the speed-up of a step of paired rollouts."""
    note = "{none_s:.2f} > {speculation_s:.2f} s, {none_forwards} > {speculation_forwards} forwards"
    note += ", {rollout/spec_accept_rate:.0%} accepted, {bubble/drafted_tokens} drafted, "
    note += "{differing_rows} of {rows} rows differ"
    return Figure(case, step["none_s"] / step["speculation_s"], "x", note.format_map(step))


def share_of_odd(prompts, completions, completion_ids, **columns) -> list[float]:
    """Return the share of odd token ids: a reward that any text has."""
    return [float(np.mean(np.array(ids) % 2)) for ids in completion_ids]


def lacking() -> str:
    """Return the names of packages that a run needs and that are not installed."""
    return ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)


def program_keys(bench: Bench) -> list[str]:
    """Return the overrides of a run of the tiny policy."""
    sizes = [*SMALL_ROLLOUT, "data.size=20"] if bench.is_small else ON_GPU
    return [*sizes, *bench.overrides]


def doctor(bench: Bench) -> Iterator[Figure]:
    """Run the doctor on all cards."""
    if lacks := lacking():
        yield left_out("doctor", f"needs {lacks}")
        return
    cards = f"--nproc_per_node={torch.cuda.device_count() if bench.is_cuda else 1}"
    command = *LAUNCHER, cards, "-m", "bubblespec", "doctor", "--config", CONFIG
    got, seconds = run_program(bench, *command, *program_keys(bench))
    warnings = re.findall("^warning: (.*)$", got.stderr, re.MULTILINE)
    yield Figure("doctor", seconds, "s", f"{len(warnings)} warnings; exit code {got.returncode}")
    for text in warnings:
        yield Figure("doctor, warning", None, note=text[:200])
    if got.returncode:
        raise RuntimeError(f"doctor: {last_line(got)}")


def training(bench: Bench) -> Iterator[Figure]:
    """Run train.py on one card, and a reward that raises, which must end it."""
    if lacks := lacking():
        yield left_out("train.py", f"needs {lacks}")
        return
    steps = 2 if bench.is_small else 5
    overrides = [f"run.max_steps={steps}", *NO_EVALUATION, *program_keys(bench)]
    train = *LAUNCHER, "--nproc_per_node=1", "train.py", "--config", CONFIG, *overrides
    with tempfile.TemporaryDirectory() as folder:
        output = f"run.output_dir={folder}/run"
        got, seconds = run_program(bench, *train, output)
        if got.returncode:
            raise RuntimeError(f"train.py: {last_line(got)}")
        with open(os.path.join(folder, "run", "metrics.jsonl"), encoding="utf-8") as file:
            metrics = [json.loads(line) for line in file]
        last = metrics[-1]
        note = f"gen {last['timing_s/gen']:.2f}, train {last['timing_s/train']:.2f} s"
        yield Figure(f"train.py, {steps} steps", seconds, "s", f"last step: {note}")
        output = f"run.output_dir={folder}/failing"
        reward = "reward.functions=[benchmarks.gpu_programs.failing_reward]"
        got, seconds = run_program(bench, *train, output, reward)
        is_shown = "ZeroDivisionError" in got.stdout + got.stderr
        note = f"exit code {got.returncode}, {'its' if is_shown else 'NO'} traceback"
        yield Figure("an exception in a reward ends train.py after", seconds, "s", note)


def last_line(got: subprocess.CompletedProcess) -> str:
    """Return the last line that a program has printed, to explain its exit code."""
    lines = (got.stderr.strip() or got.stdout.strip()).splitlines()
    return f"exit code {got.returncode}, {lines[-1] if lines else 'nothing printed'}"


def failing_reward(prompts, completions, completion_ids, **columns) -> list[float]:
    return [1 / 0]


def updates(bench: Bench) -> Iterator[Figure]:
    """Measure updates in the shapes of a run: memory peaks, tokens per second, and equal bits."""
    small, large = (16, 48, 8, 256), (512, 3584, 16, 16_384 if bench.has_room else 4096)
    prompt, response, count, tokens = bench.sizes(small, large)
    config = Config(
        model=ModelConfig(path="none"),
        rollout=RolloutConfig(max_prompt_length=prompt, max_completion_length=response),
        loss=LossConfig(loss_type="dapo"),
        optim=OptimConfig(max_tokens_per_microbatch=tokens),
    )
    rng, vocabulary = np.random.default_rng(0), SHAPES[bench.policy][3]
    lengths = rng.integers(response // 4, response, count)
    responses = [rng.integers(1, vocabulary, n) for n in lengths]
    logprobs = [np.full(n, -np.log(vocabulary), np.float32) for n in lengths]
    groups = [Group(Prompt(i, "", (1,) * prompt, {}), 0) for i in range(count // 4)]
    nothing = np.zeros(count, bool), np.zeros((count, 1))
    samples = Samples(groups, 4, responses, logprobs, *nothing)
    advantages, weights = rng.normal(size=count), []
    for number in range(2):
        model = bench.model(bench.policy).requires_grad_(True)
        ranks = Ranks(bench.device)
        learner = Learner(
            config=config,
            ranks=ranks,
            optimizer=Optimizer(model, config.optim, 10, ranks),
            model=model,
            reference=None,
            kernel=bench.kernel,
            params=SamplingParams(),
            has_warned_of_mismatch=True,  # nothing was generated
        )
        if number == 0 and bench.is_cuda:
            yield from peaks(config, learner, tokens)
        for step in range(2):
            bench.wait()
            started = time.perf_counter()
            learner.update(samples, advantages, step)
            bench.wait()
            seconds = time.perf_counter() - started
        weights.append([p.detach().to("cpu", copy=True) for p in model.parameters()])
        if number == 0:
            fed = sum(lengths) + count * prompt
            expected = bench.gpu and update_tokens_per_s(bench.gpu, bench.policy.lower())
            note = f"{fed} tokens in {seconds:.2f} s"
            yield Figure("update", fed / seconds, "tokens/s", note, expected)
            if expected:
                share = fed / seconds / expected * OWN.peak_share
                yield Figure("update, share of peak", share, "", "32% on an H200 before kernels")
            found = kernels_of(bench, partial(learner.update, samples, advantages, 2))
            for kind, ms in time_by_kind(found, UPDATE_KINDS).items():
                before = "" if bench.is_small else BEFORE_MS.get(kind, "")
                note = before and f"{before} ms on an H200 before kernels"
                yield Figure(f"update, {kind}", ms, "ms", note)
        del model, learner
    same = [torch.equal(a, b) for a, b in zip(*weights, strict=True)]
    note = f"{len(same)} parameters after 2 updates; deterministic only as exactness.md says"
    yield Figure("parameters that differ when repeated", len(same) - sum(same), "", note)


def peaks(config: Config, learner: Learner, tokens: int) -> Iterator[Figure]:
    """Measure the memory of micro-batches of long samples, and of short ones."""
    expected = gradient_peak(config, learner) / 1e9
    for case, lengths in (("long", None), ("short", [64] * (tokens // 64))):
        peak = gradient_peak(config, learner, lengths) / 1e9
        note = "expected: what a run reserves"
        yield Figure(f"peak, {tokens} tokens of {case} samples", peak, "GB", note, expected)
