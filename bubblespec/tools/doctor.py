"""Check whether this machine can run a configuration, on one rank or on all:

python -m bubblespec doctor --config FILE [--nproc-per-node N] [section.key=value ...]

It builds the run as train.py does, with the same lines about what is slower than it could be. Then
it makes the beginning of a rollout and an update of it. Texts, a gradient and the rollout must be
those of transformers' modules up to rounding, on CPUs too. Nothing is left on disk.
"""

import importlib.util
import os
import platform
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import combinations
from typing import cast

import numpy as np
import torch

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks, ranks_from_environment
from bubblespec.engine.decoder import is_written_out
from bubblespec.engine.kv_cache import PAGE
from bubblespec.engine.ops import torch_ops
from bubblespec.engine.runner import ModelRunner
from bubblespec.errors import RunFailed
from bubblespec.learn.agreement import rows_problem
from bubblespec.memory import host_bytes, max_length, max_slots
from bubblespec.setup import agree, build, warn_of
from bubblespec.telemetry.trace import describe_hardware
from bubblespec.tools import make_parser, parse
from bubblespec.trainer import Trainer
from bubblespec.types import StepBatch, completion_mask

TIMEOUT_S = 300.0  # that a rank waits for another, at most: run.timeout_s may be hours
MIN_PROMPTS, MAX_TOKENS = 2, 64  # of the rollout
FREE_SHARE = 0.9  # of a GPU's memory; with less another program uses it


def versions() -> str:
    """Return the versions of Python and of the packages that compute forwards."""
    names = ["torch", "transformers"]
    names += ["flash-attn"] * (importlib.util.find_spec("flash_attn") is not None)
    found = [f"python {platform.python_version()}", *(f"{n} {metadata.version(n)}" for n in names)]
    return ", ".join(found + [f"cuda {torch.version.cuda}"] * (torch.version.cuda is not None))


def devices(ranks: Ranks) -> tuple[str, list[str]]:
    """Describe the devices and their memory; also return warnings."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    hardware, (free, total) = describe_hardware(ranks.device), host_bytes()
    threads, cores = hardware["threads"], hardware["cores"]
    text = f"{ranks.world_size} ranks with {threads} threads each; {cores} cores "
    text += f"({hardware['cpu']}), {free / 1e9:.3g} of {total / 1e9:.3g} GB of memory free"
    if ranks.device.type == "cpu":
        many = f"{num_local * threads} threads share {cores} cores; OMP_NUM_THREADS=1"
        return text, [many] * (num_local * threads > cores)
    free, total = torch.cuda.mem_get_info(ranks.device)
    text += f"; {num_local} x {hardware['gpu']}, {free / 1e9:.3g} of {total / 1e9:.3g} GB free"
    warnings = []
    if free < FREE_SHARE * total:
        warnings.append(f"other programs use {ranks.device}; CUDA_VISIBLE_DEVICES")
    if (num_cards := torch.cuda.device_count()) > num_local:
        warnings.append(f"{num_local} of {num_cards} GPUs are used; --nproc_per_node={num_cards}")
    pairs = combinations(range(num_local), 2)
    if apart := [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]:
        warnings.append(f"{len(apart)} pairs of GPUs, such as {apart[0]}, have no direct link")
    return text, warnings


def chosen(trainer: Trainer) -> tuple[str, list[str]]:
    """Describe what set-up has chosen; also return warnings."""
    sampler, model, ranks = trainer.sampler, trainer.learner.model, trainer.ranks
    runner = cast(ModelRunner, sampler.engine.runner)
    layers = "written out" if is_written_out(model) else "transformers' modules"
    by = "torch's operations" if runner.forward.ops is torch_ops else "own kernels"
    is_eager = runner.graphs is None or runner.graphs.pool.problem is not None
    launched = "eager" if is_eager else "CUDA graphs"
    room = f"{max_length(trainer.config)} tokens each"
    if runner.pages is not None:
        room = f"{runner.pages.num_pages} pages of {PAGE} tokens in all"
    ticks = "no ticks" if sampler.board is None else f"ticks by {sampler.board.transport.name}"
    text = (
        f"layers {layers}, computed by {by}, {launched}; training with {trainer.learner.kernel} "
        f"attention; each rank has room for {runner.num_slots} responses at once, {room}; {ticks}; "
        f"mechanisms: {', '.join(of.name for of in sampler.mechanisms) or 'none'}"
    )
    useful = max_slots(trainer.config, ranks.world_size)
    more = f"{useful} responses at once could be used; rollout.max_num_seqs (docs/gpus.md)"
    return text, [more] * (runner.num_slots < useful)


def try_step(trainer: Trainer) -> str:
    """Make a rollout of a few prompts and an update of it; return what they took.

    Raises RunFailed where tokens or log-probabilities are not those of transformers' modules."""
    sampler, learner, ranks = trainer.sampler, trainer.learner, trainer.ranks
    rollout, seed, began_s = trainer.config.rollout, trainer.config.run.seed, time.perf_counter()
    longest = rollout.max_completion_length = min(rollout.max_completion_length, MAX_TOKENS)
    groups = sampler.schedule.launch(0).groups[: max(MIN_PROMPTS, ranks.world_size)]
    plan = sampler.plan(StepBatch(groups, len(groups), rollout.num_generations), 0, groups)
    result = sampler.rollout(plan)
    samples, generated_s = result.samples, time.perf_counter()
    assert samples is not None
    # Of episodes only those of one turn: further turns begin behind an environment's answer.
    rows = [r for r in plan.rows.values() if not r.has_turns or completion_mask(r.logprob).all()]
    if problem := agree(partial(rows_problem, learner.model, rows, sampler.params, seed), ranks):
        raise RunFailed(problem)
    compared_s = time.perf_counter()
    metrics, _ = learner.update(samples, np.resize((1.0, -1.0), len(samples)), step=0)
    update_s, acceptance = time.perf_counter() - compared_s, result.record.acceptance
    return (
        f"{len(samples)} responses of up to {longest} tokens in {generated_s - began_s:.2f} s, "
        f"with {acceptance.accepted_tokens} of {acceptance.draft_tokens} draft tokens accepted on "
        f"rank 0; an update of them in {update_s:.2f} s, gradient norm {metrics['grad_norm']:.3g}"
    )


def main(arguments: list[str]) -> None:
    """Check everything. Raises InputError and RunFailed."""
    given = parse(make_parser("doctor"), arguments)
    config = load_config(given.config, given.overrides)
    timeout_s = min(config.run.timeout_s, TIMEOUT_S)
    with (
        ranks_from_environment(config.model.device, timeout_s) as ranks,
        tempfile.TemporaryDirectory() as folder,
    ):

        def show(name: str, text: str, warnings: list[str]) -> None:
            if ranks.is_main:
                print(f"{name}: {text}", flush=True)
            warn_of([f"warning: {line}" for line in warnings], ranks)

        show("versions", versions(), [])
        show("devices", *devices(ranks))
        own = replace(config.run, output_dir=folder, timeout_s=timeout_s)
        own.resume_from_checkpoint = "none"
        trainer = build(replace(config, run=own), ranks, is_strict=True)
        show("set-up", *chosen(trainer))
        show("step", try_step(trainer), [])
        show("ok", "texts, gradient and rollout are those of transformers' modules", [])
