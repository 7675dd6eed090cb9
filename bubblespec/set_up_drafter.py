"""The learned drafter of a run: made by a warm start or read from a folder, and put into the
engine, the proposer and the learner."""

import json
import os
import shutil

import numpy as np
from safetensors import SafetensorError

from bubblespec.config import Config, flatten
from bubblespec.dist.ranks import Ranks
from bubblespec.draft.learned import LearnedDrafts
from bubblespec.engine.chains import Chains
from bubblespec.engine.drafter import Drafter
from bubblespec.engine.linear import Plan, use_plans
from bubblespec.errors import InputError, log
from bubblespec.learn.drafter_training import DrafterTraining
from bubblespec.learn.idle_training import IdleTraining
from bubblespec.learn.learner import Learner
from bubblespec.learn.warm_start import (
    DRAFTER_FILE,
    frequent_ids,
    generate,
    learn_from,
    load_drafter,
    save_drafter,
    train,
)
from bubblespec.rollout.sampler import Sampler

MOST_STEPS = 256  # whose prompts a warm start answers
BUFFER_TOKENS = 50_000  # of recent responses, with hidden states, that each rank keeps
VOCAB_SIZE = 16_384  # most token ids that it drafts: the most frequent ones
LEARNING_RATE = 1e-3  # at the start of the warm start
KEPT = "drafter"  # folder in run.output_dir of what a warm start has made
MADE_BY_FILE = "made_by.json"  # in it: these keys of the configuration
MADE_BY = ("drafter.warm_start",)


def find(config: Config, checkpoint: str | None, ranks: Ranks) -> tuple[str, str] | None:
    """The folder of the saved drafter that a run goes on with, and the key that says so; None where
    it is to train one. The warm start's own is for a run that has ended before its first
    checkpoint, and goes on with the same settings."""
    if checkpoint and os.path.isfile(os.path.join(checkpoint, DRAFTER_FILE)):
        return checkpoint, "run.resume_from_checkpoint"
    if config.drafter.path:
        return config.drafter.path, "drafter.path"
    kept = os.path.join(config.run.output_dir, KEPT)
    fits = config.run.resume_from_checkpoint != "none" and _made_by(kept) == _settings(config)
    return (kept, "run.output_dir") if ranks.gather(np.array([fits], np.int64)).all() else None


def _settings(config: Config) -> dict:
    """What a warm start's drafter depends on, and a continuation may change."""
    keys = flatten(config)
    return {key: keys[key] for key in MADE_BY}


def _made_by(folder: str) -> dict | None:
    try:
        with open(os.path.join(folder, MADE_BY_FILE), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def warm_start(sampler: Sampler, learner: Learner, step: int, plans: dict[str, Plan]) -> None:
    """Before `step`, on all ranks together: answer its prompts and those of later steps, and train
    a drafter on that. The answers become drafts of their steps. plans: of linear layers. Raises
    StopRequested, and InputError for a policy that can have none."""
    config, ranks, schedule = sampler.config, sampler.ranks, sampler.schedule
    ranks.place = "warm start of the drafter"
    depth = min(MOST_STEPS, config.run.max_steps - step - 1)
    batches = [schedule.launch(step).groups, *schedule.upcoming(step, depth)]
    rows = generate(batches, config, sampler.engine, sampler.params, ranks)
    if "bubble" in config.speculative.method:
        sampler.keep_as_drafts(rows, step, are_deferred=False)
    sampler.engine.release()
    ids = frequent_ids(rows, sampler.params.stop_token_ids, VOCAB_SIZE, ranks)
    try:
        drafter = Drafter(learner.model, ids, config.run.seed)
    except ValueError as error:
        raise InputError(f"speculative.method: no drafter for this policy: {error}") from error
    # All of the warm start is learnt from; only later fewer tokens are kept.
    most = max(2 * config.drafter.warm_start, BUFFER_TOKENS)
    training, chains = _parts(drafter, sampler, learner, plans, most)
    learn_from(training, learner.model, rows, config.optim.max_tokens_per_microbatch)
    accepted = train(training, chains, ranks)
    training.lessons.shrink(BUFFER_TOKENS)
    _use(training, chains, accepted, sampler, learner)


def keep(sampler: Sampler) -> None:
    """On rank 0, after a warm start: save the drafter for `find`. What cannot be written is said,
    and not kept."""
    folder = os.path.join(sampler.config.run.output_dir, KEPT)
    temporary = os.path.join(sampler.config.run.output_dir, f"tmp-{KEPT}")
    try:
        for old in (temporary, folder):
            shutil.rmtree(old, ignore_errors=True)
        os.makedirs(temporary)
        save_drafter(temporary, sampler.drafter.training, sampler.drafter.accepted)
        with open(os.path.join(temporary, MADE_BY_FILE), "w", encoding="utf-8") as file:
            json.dump(_settings(sampler.config), file)
        os.rename(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        log(
            f"warning: the drafter could not be kept in {folder}: {' '.join(str(error).split())}, and the run goes on"
        )


def load(folder: str, sampler: Sampler, learner: Learner, key: str, plans: dict[str, Plan]) -> None:
    """Use a saved drafter. key: of the configuration, which named the folder. Raises InputError."""
    drafter, about = load_drafter(folder, learner.model, sampler.config.run.seed, key)
    training, chains = _parts(drafter, sampler, learner, plans, BUFFER_TOKENS)
    training.num_updates = about["num_updates"]
    for group in training.optimizer.param_groups:
        group["lr"] = about["learning_rate"]
    _use(training, chains, about["accepted"], sampler, learner)


def _parts(
    drafter: Drafter, sampler: Sampler, learner: Learner, plans: dict[str, Plan], max_tokens: int
) -> tuple[DrafterTraining, Chains]:
    """max_tokens: to learn from at a time."""
    config, runner = sampler.config, sampler.engine.runner
    use_plans(drafter, plans)
    training = DrafterTraining(
        drafter,
        learner.kernel,
        learning_rate=LEARNING_RATE,
        temperature=config.rollout.temperature,
        max_tokens=max_tokens,
        seed=config.run.seed,
    )
    return training, Chains(drafter, runner, sampler.params)


def _use(
    training: DrafterTraining,
    chains: Chains,
    accepted: np.ndarray,
    sampler: Sampler,
    learner: Learner,
) -> None:
    ranks = sampler.ranks
    source = LearnedDrafts(chains, sampler.engine, sampler.proposer.cost, ranks.clock)
    source.acceptance.expect(accepted)
    source.follow(True)
    source.profile()
    sampler.proposer.sources.append(source)
    if (tail := sampler.tail) is not None:
        runner = tail.engine.runner
        runner.chains = Chains(training.drafter, runner, sampler.params)
        tail.draft_with(source, runner.chains)
    sampler.drafter = IdleTraining(training, chains, source, accepted, ranks.clock)
    learner.on_hidden = sampler.drafter.take
