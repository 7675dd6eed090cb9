"""Parts of the GPU suite that run whole programs (tests, doctor, training); updates, sampling."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu_bench import SHAPES, Bench, Figure
from benchmarks.shared import ROOT
from bubblespec.config import Config, LossConfig, ModelConfig, OptimConfig, RolloutConfig
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine import compiled
from bubblespec.engine.compiled import (
    OPTIONS,
    compile_for_any_length,
    compile_reduction,
    first_difference,
)
from bubblespec.engine.noise import stream_keys
from bubblespec.engine.sampling import SamplingParams, best_and_sum, sample
from bubblespec.learn.learner import Learner
from bubblespec.learn.microbatch import pack_responses
from bubblespec.learn.optimizer import Optimizer
from bubblespec.memory import full_batch, gradient_peak, peak_of
from bubblespec.samples import Samples
from bubblespec.tools.doctor.forwards import FORWARD_CHECKS, Case
from bubblespec.tools.simulate.roofline import SAMPLE_S
from bubblespec.types import Group, Prompt

GPU_TESTS = ("attention", "graphs", "compiled", "noise", "tp_graphs")
CONFIG = "configs/tiny_cpu.yaml"
NEEDED = ("omegaconf", "datasets", "reasoning_gym", "psutil", "accelerate")  # by train.py
PROGRAM_S = 240.0  # that a program may take


def run_program(*arguments: str) -> tuple[subprocess.CompletedProcess, float]:
    """Return what `python arguments` printed, and its seconds. Raises TimeoutExpired."""
    started = time.perf_counter()
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": PROGRAM_S}
    got = subprocess.run([sys.executable, *arguments], **options)
    return got, time.perf_counter() - started


def gpu_tests(bench: Bench) -> Iterator[Figure]:
    """Run the tests marked gpu."""
    files = [f"tests/test_{name}.py" for name in GPU_TESTS]
    options = ("-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist")
    got, seconds = run_program("-m", "pytest", *options, *files)
    lines = (got.stdout.strip() or got.stderr.strip() or "nothing printed").splitlines()
    yield Figure("pytest -m gpu", seconds, "s", lines[-1])
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield Figure(line[:100], None, note=line[100:300])
    if got.returncode:
        raise RuntimeError(f"pytest ended with exit code {got.returncode}")


def checks(bench: Bench) -> Iterator[Figure]:
    """Run the doctor's checks of forwards, and time each line."""
    config = Config(model=ModelConfig(path="none"))
    case = Case(config, Ranks(bench.device), bench.model(bench.policy), bench.kernel)
    for name, check in FORWARD_CHECKS.items():
        started = time.perf_counter()
        for verdict, text in check.make(case):
            yield Figure(name, time.perf_counter() - started, "s", f"{verdict}: {text}")
            started = time.perf_counter()


def programs(bench: Bench) -> Iterator[Figure]:
    """Run the doctor, train.py on one rank, and a reward that raises, which must end train.py."""
    lacks = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacks:
        yield Figure("doctor, train.py", None, note=f"not run without {', '.join(lacks)}")
        return
    overrides = ["model.device=cuda", "model.dtype=bfloat16"]
    if bench.is_small:
        overrides = ["rollout.num_prompts_per_step=2", "rollout.max_completion_length=16"]
        overrides.append("data.size=20")
    got, seconds = run_program("-m", "bubblespec", "doctor", "--config", CONFIG, *overrides)
    lines = re.findall(r"^\w[\w ]* +(ok|slower|failed): (.*)$", got.stdout, re.MULTILINE)
    verdicts = [verdict for verdict, _ in lines]
    note = ", ".join(f"{verdicts.count(name)} {name}" for name in ("ok", "slower", "failed"))
    yield Figure("doctor", seconds, "s", f"{note}; exit code {got.returncode}")
    for verdict, text in lines:
        if verdict != "ok":
            yield Figure(f"doctor, {verdict}", None, note=text[:200])
    steps = 2 if bench.is_small else 5
    overrides += [f"run.max_steps={steps}", "eval.num_prompts=0", "run.eval_steps=0"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "train.py")
    with tempfile.TemporaryDirectory() as folder:
        output = f"run.output_dir={folder}/run"
        got, seconds = run_program(*launcher, "--config", CONFIG, *overrides, output)
        if got.returncode:
            raise RuntimeError(f"train.py: {got.stderr.strip().splitlines()[-1:]}")
        with open(os.path.join(folder, "run", "metrics.jsonl"), encoding="utf-8") as file:
            metrics = [json.loads(line) for line in file]
        last = metrics[-1]
        note = f"gen {last['timing_s/gen']:.2f}, train {last['timing_s/train']:.2f} s"
        yield Figure(f"train.py, {steps} steps", seconds, "s", f"last step: {note}")
        output = f"run.output_dir={folder}/failing"
        reward = "reward.functions=[benchmarks.gpu_programs.failing_reward]"
        got, seconds = run_program(*launcher, "--config", CONFIG, *overrides, output, reward)
        is_shown = "ZeroDivisionError" in got.stdout + got.stderr
        note = f"exit code {got.returncode}, {'its' if is_shown else 'NO'} traceback"
        yield Figure("an exception in a reward ends train.py after", seconds, "s", note)


def failing_reward(prompts, completions, completion_ids, **columns) -> list[float]:
    return [1 / 0]


def updates(bench: Bench) -> Iterator[Figure]:
    """Measure updates in the shapes of a run: memory peaks, tokens per second, and equal bits."""
    small, large = (16, 48, 8, 256), (512, 3584, 16, 16_384)
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
    samples = Samples(groups, 4, responses, logprobs, logprobs, *nothing)
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
        if number == 0:
            fed = sum(lengths) + count * prompt
            yield Figure("update", fed / seconds, "tokens/s", f"{fed} tokens in {seconds:.2f} s")
        weights.append([p.detach().to("cpu", copy=True) for p in model.parameters()])
        del model, learner
    same = [torch.equal(a, b) for a, b in zip(*weights, strict=True)]
    note = f"{len(same)} parameters after 2 updates; deterministic only as exactness.md says"
    yield Figure("parameters that differ when repeated", len(same) - sum(same), "", note)


def peaks(config: Config, learner: Learner, tokens: int) -> Iterator[Figure]:
    """Measure the memory of micro-batches of long samples, and of short ones."""
    expected = gradient_peak(config, learner) / 1e9
    longest = full_batch(tokens, config)
    for case, lengths in (("long", longest), ("short", [64] * (tokens // 64))):
        texts = [np.zeros(n, int) for n in lengths]
        generated = [np.zeros(n, np.float32) for n in lengths]
        batch = pack_responses([(0,)] * len(lengths), texts, generated, learner.ranks.device)
        step = partial(learner.accumulate_gradient, batch, *[np.zeros(len(lengths))] * 2)
        peak = peak_of(step, learner.ranks.device) / 1e9
        note = "expected: what a run reserves"
        yield Figure(f"peak, {tokens} tokens of {case} samples", peak, "GB", note, expected)
    learner.optimizer.clear()


def sampling(bench: Bench) -> Iterator[Figure]:
    """Time sampling, eager and compiled; then try options of the compiler.

    A compiled reduction that differs in a token is not used, and the note says so.
    """
    vocabulary = SHAPES[bench.policy][3]
    reductions = {"eager": (best_and_sum, None)}
    if bench.is_cuda:
        reductions["compiled"] = compile_reduction(vocabulary, bench.dtype, bench.device)
    for count in bench.sizes((1, 4), (1, 16, 128, 512)):
        logits = torch.randn(count, vocabulary, dtype=bench.dtype, device=bench.device)
        position = np.arange(count)
        keys = stream_keys(0, position, *[np.zeros_like(position)] * 3)
        keys, generated = (torch.from_numpy(a).to(bench.device) for a in (keys, position))
        for name, (reduce, problem) in reductions.items():
            call = partial(sample, logits, keys, generated, SamplingParams(), reduce)
            with torch.inference_mode():
                ms = 1e3 * bench.seconds(call)
            expected = 1e3 * SAMPLE_S * count if name == "compiled" and bench.gpu else None
            yield Figure(f"{count} positions, {name}", ms, "ms", problem or "", expected)
    if not bench.is_cuda:
        yield Figure("options of the compiler that give equal tokens", None, note="needs a GPU")
        return
    for size in range(len(OPTIONS) + 1):
        for names in itertools.combinations(OPTIONS, size):
            torch._dynamo.reset()
            with patch.object(compiled, "OPTIONS", dict.fromkeys(names, True)):
                reduce = compile_for_any_length(best_and_sum)
                difference = first_difference(reduce, vocabulary, bench.dtype, bench.device)
            case = f"compiled with {', '.join(names) or 'no options'}"
            yield Figure(case, None, note=difference or "equal tokens")
