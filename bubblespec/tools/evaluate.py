"""Evaluate a checkpoint or a model on held-out prompts, as a run does:

python -m bubblespec evaluate CHECKPOINT_OR_MODEL [--config FILE] [--nproc-per-node N]
    [--json OUT] [--responses OUT.jsonl] [section.key=value ...]

A checkpoint is a folder checkpoint-N, or the folder of a run, of which the newest counts; without
--config it is evaluated as its run was configured. A model is a folder or a name of the hub. There
are no optimizer, as nothing is trained, and no drafts, which would change no token.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bubblespec import loading
from bubblespec.checkpoint import (
    CONFIG_FILE,
    FORMAT,
    PLANNER_FILE,
    STATE_FILE,
    find_damage,
    list_checkpoints,
    load_arrays,
    newest_whole,
    read_state,
    refuse_what_does_not_fit,
)
from bubblespec.config import Config
from bubblespec.config.file import config_of_sections, load_config
from bubblespec.data.prompts import DATE, HELD_OUT
from bubblespec.data.schedule import PromptSet, StepSchedule
from bubblespec.distributed.ranks import Ranks, ranks_from_environment
from bubblespec.distributed.shared_memory import open_collectives
from bubblespec.errors import InputError, log
from bubblespec.learn.learner import Learner
from bubblespec.mechanisms import Run
from bubblespec.metrics import ROWS, row_of
from bubblespec.records import Samples
from bubblespec.rewards.scorer import (
    RewardManager,
    begin_trial,
    check_prompts,
    check_weights,
    end_trial,
)
from bubblespec.rollout.evaluate import Evaluator
from bubblespec.setup import (
    call,
    load_functions,
    load_policy,
    make_generator,
    prepare,
    rewards_of,
    sampling_params,
    warn_of,
)
from bubblespec.telemetry.files import describe_sample, json_line, must_write
from bubblespec.telemetry.report import short_names
from bubblespec.telemetry.reporter import show_phase
from bubblespec.tools import make_parser, parse
from bubblespec.types import Prompt

# What checks of a run's configuration are about, and an evaluation is not.
NEEDLESS = ["run.eval_steps=1", f"optim.max_tokens_per_microbatch={1 << 20}"]


class Policy(NamedTuple):
    """What generates, and how."""

    config: Config
    folder: str | None
    """Checkpoint; None of a model."""
    state: dict
    """Content of the checkpoint's trainer_state.json, see `read_state`."""
    planner: dict[str, np.ndarray]
    """The checkpoint's state of schedule and data."""

    @property
    def num_updates(self) -> int:
        return self.state.get("step", 0)


def read_policy(
    path: str, config_file: str | None, overrides: Sequence[str], sections: dict | None = None
) -> Policy:
    """Return a checkpoint or model, with the configuration of the file, or of the checkpoint's run.

    sections: for a model without either; None requires a file. Raises InputError."""
    folder, planner = find_saved(path), dict[str, np.ndarray]()
    state: dict = {}
    if folder is not None:
        state = read_state(folder)
        if state.get("format") != FORMAT:
            raise InputError(f"{folder} was written by another version of this package")
        with refuse_what_does_not_fit(folder):
            planner = load_arrays(folder, PLANNER_FILE)
    given = [*overrides, *NEEDLESS]
    if config_file is not None:
        config = load_config(config_file, given)
    elif folder is not None:
        saved: dict[str, dict] = {}
        for key, value in state["config"].items():
            section, _, leaf = key.partition(".")
            saved.setdefault(section, {})[leaf] = value
        config = config_of_sections(saved, given, folder)
    elif sections is not None:
        config = config_of_sections(sections | {"model": {"path": path}}, given, path)
    else:
        raise InputError(
            f"--config: {path} is no checkpoint, so a file has to say what to evaluate"
        )
    config.model.lora_r = state.get("config", {}).get("model.lora_r", 0)
    if not config.model.lora_r:
        config.model.path = folder or path
    else:
        config.model.lora_alpha = state["config"]["model.lora_alpha"]
    return Policy(for_generation(config), folder, state, planner)


def find_saved(path: str) -> str | None:
    """Return the checkpoint that a path means; None for a model. Raises InputError."""
    if os.path.isfile(os.path.join(path, STATE_FILE)):
        if damage := find_damage(path):
            raise InputError(f"{path} is damaged: {damage}")
        return path
    existing = list_checkpoints(path)
    if not existing:
        if os.path.isfile(os.path.join(path, CONFIG_FILE)):
            raise InputError(f"{path} is the folder of a run that has no checkpoint yet")
        return None
    if (newest := newest_whole(existing)) is None:
        raise InputError(f"all checkpoints in {path} are damaged")
    return newest


def for_generation(config: Config) -> Config:
    """Turn off what is for training, and what changes the time of a rollout alone."""
    config.model.teacher_path, config.model.gradient_checkpointing = None, False
    config.loss.kl_coef = 0.0
    config.optim.shard_state = config.optim.stream_gradients = config.tail_batching.enabled = False
    config.speculative.method, config.drafter.path = "none", None
    config.rollout.placement, config.rollout.tp_tail_max_rows = "in_turn", 0
    return config


def build(
    policy: Policy, ranks: Ranks, read_prompts: Callable[[Run, Policy], list[Prompt]]
) -> tuple[Evaluator, list[Prompt]]:
    """Build what generates and scores responses, on all ranks together; return it and the prompts.

    read_prompts: may change rollout.max_prompt_length. Raises InputError."""
    if ranks.world_size > 1 and ranks.device.type == "cpu":
        ranks.shared = open_collectives(ranks)
    config = loading.with_dtype(policy.config, ranks.device.type)
    called = load_functions(config)
    checkpoint = policy.folder if config.model.lora_r else None
    run = Run(config, ranks, state=policy.state, checkpoint=checkpoint)
    now_s = ranks.all_gather(np.array([loading.local_time_s()]))[0]
    with show_phase(ranks, "loading the model"):
        num_tokens, lines = load_policy(run, int(policy.planner.get(DATE, now_s)[0]))
        run.model.requires_grad_(False)
        rewards, own = rewards_of(run, called)
    with show_phase(ranks, "reading the prompts"):
        prompts = read_prompts(run, policy)
        weights = [1.0] * run.has_reward
        if rewards:
            weights = check_weights(config, run.has_reward)
            has = {"answers_turns": run.answers_turns, "has_reward": run.has_reward}
            check_prompts(config, rewards, {"the held-out data": prompts}, ranks, own, **has)
        call("check", run, prompts)
    with show_phase(ranks, "checking the model"):
        kernel, warnings = prepare(run, run.model, num_tokens)
        call("prepare", run)
    warn_of(lines + warnings, ranks)
    run.learner = Learner(
        config=config,
        ranks=ranks,
        model=run.model,
        reference=None,
        optimizer=None,  # type: ignore[arg-type]  # nothing is trained
        params=sampling_params(run),
        kernel=kernel,
        answers_turns=run.answers_turns,
    )
    # The engine has room for as many responses as there are.
    config.rollout.num_prompts_per_step = len(prompts)
    config.rollout.num_generations = size = config.eval.num_generations
    schedule = StepSchedule(PromptSet(prompts, 0), config.run.seed, len(prompts), size)
    scorer = RewardManager(config.reward, rewards, run.tokenizer, ranks, run.has_reward, own)
    scorer.progress = (policy.num_updates, config.run.max_steps)
    trial = begin_trial(scorer, rewards | own, prompts[0], size) if ranks.is_main else {}
    evaluator = make_generator(run, schedule, scorer, weights)
    ranks.run_on_rank0(lambda: end_trial(scorer, trial))
    return evaluator, prompts


def held_out_prompts(run: Run, policy: Policy) -> list[Prompt]:
    """Return the held-out prompts, the checkpoint's own if they are as many. Raises InputError."""
    config, count = run.config, run.config.eval.num_prompts
    before = policy.state.get("config", {}).get("eval.num_prompts", count)
    saved = policy.planner.get(HELD_OUT) if count == before else None
    warn = log if run.ranks.is_main else lambda line: None
    given = config, run.tokenizer, run.tokenize
    _, prompts = loading.load_prompts(*given, saved_held_out=saved, warn=warn)
    if count > before and not (config.data.eval_path or config.data.eval_split):
        held_out = f"{count}, but the run held {before} out"
        warn(f"warning: eval.num_prompts: {held_out}; it may have trained on the others")
    return prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `evaluate` and `generate` have in common."""
    what = "checkpoint-N of a run, the run's folder (its newest), a model's folder or hub name"
    parser.add_argument("policy", metavar="CHECKPOINT_OR_MODEL", help=what)
    parser.add_argument("--responses", metavar="OUT.jsonl", help="file for all responses")


def check_outputs(ranks: Ranks, outputs: dict[str, str | None]) -> None:
    """Raise InputError, before the work, for a file that cannot be written. outputs: by option."""

    def check() -> None:
        for option, path in outputs.items():
            if path is not None:
                with must_write(option, path):
                    open(path, "a").close()

    ranks.run_on_rank0(check)


def write_responses(path: str, samples: Samples, names: list[str], tokenizer) -> None:
    """Write each sample as a line of JSON. names: of the rewards."""
    with must_write("--responses", path), open(path, "w", encoding="utf-8") as file:
        for index in range(len(samples)):
            file.write(json_line(describe_sample(samples, index, names, tokenizer)))


def table(metrics: dict[str, float | str]) -> str:
    """Return a line for each number, in the order of docs/metrics.md."""
    numbers = {key: value for key, value in metrics.items() if not isinstance(value, str)}
    keys = sorted(numbers, key=lambda key: ROWS.index(row_of(key)))
    return "\n".join(f"{key:34}{numbers[key]:>12,.3f}" for key in keys)


def main(arguments: list[str]) -> None:
    """Evaluate, and print a table. Raises InputError."""
    parser = make_parser("evaluate")
    add_arguments(parser)
    parser.add_argument("--json", metavar="OUT", help="file for the metrics")
    given = parse(parser, arguments, needs_config=False)
    policy = read_policy(given.policy, given.config, given.overrides)
    config = policy.config
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        check_outputs(ranks, {"--json": given.json, "--responses": given.responses})
        evaluator, prompts = build(policy, ranks, held_out_prompts)
        with show_phase(ranks, "evaluating"):
            samples, _, metrics = evaluator.evaluate(prompts, policy.num_updates)
        if not ranks.is_main:
            return
        scorer, size = evaluator.sampler.scorer, config.eval.num_generations
        name, params = policy.folder or given.policy, evaluator.params
        sampling = (
            f"temperature {params.temperature:g}, top_p {params.top_p:g}, top_k {params.top_k}"
        )
        print(f"{name}: {len(prompts)} prompts, {size} responses each, {sampling}")
        print(table(metrics), flush=True)
        if given.responses:
            names = short_names(scorer.names_of(None))
            write_responses(given.responses, samples, names, scorer.tokenizer)
        if given.json:
            facts = {"policy": name, "step": policy.num_updates, "num_prompts": len(prompts)}
            facts |= {"num_generations": size, **dataclasses.asdict(params), "metrics": metrics}
            with must_write("--json", given.json), open(given.json, "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1)
