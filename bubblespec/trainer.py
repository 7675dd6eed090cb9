"""Everything a run holds, how it is set up, and its evaluation. The loop itself is in train.py."""

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bubblespec.checkpoint import (
    STATE_FILE,
    SaveFailed,
    find_checkpoint,
    load_optimizer,
    load_speculation,
    lock_output_dir,
    read_state,
    save_checkpoint,
)
from bubblespec.checks import check_memory, check_moments, check_same_architecture, check_vocabulary
from bubblespec.config import Config
from bubblespec.data import Prompt, PromptSet, build_prompt_set, load_rows, make_tokenize, reasoning_gym_rows
from bubblespec.distributed import Ranks, StopRequested
from bubblespec.engine.attention import choose_kernel
from bubblespec.engine.generator import Generator, Row
from bubblespec.engine.model import enable_gradient_checkpointing, prepare_model
from bubblespec.engine.noise import EVALUATION
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError, RunFailed, say
from bubblespec.lora import add_adapter
from bubblespec.memory import choose_num_slots
from bubblespec.metrics import MetricsLogger
from bubblespec.optimizer import Optimizer
from bubblespec.out_of_memory import TokenBudget
from bubblespec.rewards import RewardFunction, check_arguments, combine, load_reward, overlong_penalty
from bubblespec.rollout import Samples, assign_prompts, gather_samples, generate, make_rows
from bubblespec.schedule.run_ahead import RolloutStats
from bubblespec.schedule.speculation import Speculation, make_speculation
from bubblespec.scoring import Scorer
from bubblespec.timeline import Event
from bubblespec.update import train_on_samples


@dataclass
class Trainer:
    """The parts of a run, and how far it is.

    first_step: updates already done by the run that this one continues; num_updates: those done by now; saved: those in the
    newest checkpoint; evaluated: those before the last evaluation, or -1.
    reference: the initial policy, of which the KL is taken; with LoRA `model` itself, whose adapter is then turned off.
    """

    config: Config
    ranks: Ranks
    model: PreTrainedModel
    reference: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    kernel: str
    engine: Generator
    sampling: SamplingParams
    optimizer: Optimizer
    train_prompts: PromptSet
    eval_prompts: list[Prompt]
    rewards: dict[str, RewardFunction]
    reward_weights: list[float]
    scorer: Scorer
    first_step: int
    num_updates: int
    saved: int
    evaluated: int
    lock: IO | None  # keeps output_dir ours; on rank 0
    budget: TokenBudget
    speculation: Speculation | None = None
    num_skipped_in_a_row: int = 0  # steps

    def batch(self, step: int) -> list[Prompt]:
        """The global batch of `step`, the same on every rank."""
        return self.train_prompts.batch(self.config.run.seed, step, self.config.rollout.num_prompts_per_step)

    def own_share(self, prompts: list[Prompt]) -> list[Prompt]:
        """This rank's prompts of a batch."""
        return [prompts[i] for i in assign_prompts(len(prompts), self.ranks.world_size)[self.ranks.rank]]

    def owners(self, prompts: list[Prompt]) -> list[int]:
        """The rank that generates each prompt of a batch."""
        rank_of = {n: rank for rank, share in enumerate(assign_prompts(len(prompts), self.ranks.world_size)) for n in share}
        return [rank_of[n] for n in range(len(prompts))]

    def combined(self, samples: Samples) -> np.ndarray:
        """Reward of each sample in training: the weighted sum and the overlong penalty, float64 [S]."""
        return combine(samples.rewards, self.reward_weights) + self.overlong(samples)

    def overlong(self, samples: Samples) -> np.ndarray:
        """The overlong penalty of each sample, float64 [S]; 0 where it is off."""
        reward, limit = self.config.reward, self.config.rollout.max_completion_length
        return overlong_penalty(samples.lengths, limit, reward.overlong_buffer_length, reward.overlong_penalty_factor)


def set_up(config: Config, ranks: Ranks) -> Trainer:
    """Load model, data and rewards, and continue from a checkpoint if there is one. Raises InputError for bad input."""
    torch.manual_seed(config.run.seed)
    checkpoint = find_checkpoint(config, ranks)
    check_all_see(checkpoint, ranks)
    functions = {path: load_reward(path) for path in config.reward.functions}
    tokenizer = _load(AutoTokenizer, config, config.model.path)
    model = _load_model(config, checkpoint, ranks.device)
    check_vocabulary(config, model, tokenizer)
    if checkpoint:
        check_same_architecture(_load(AutoConfig, config, config.model.path), model, checkpoint)
    max_length = config.rollout.max_prompt_length + config.rollout.max_completion_length
    try:
        prepare_model(model, max_length)
        kernel = choose_kernel(config.model.attention, ranks.device)
    except ValueError as error:  # the engine's own word for input errors: it knows nothing of this package's
        names_key = str(error).startswith(("rollout.", "model."))
        raise InputError(str(error) if names_key else f"model.path: {error}") from error
    reference = None
    if config.loss.kl_coef > 0 and config.model.lora_r:
        reference = model  # with its adapter off
    elif config.loss.kl_coef > 0:
        reference = _load_model(config, None, ranks.device) if checkpoint else copy.deepcopy(model)
        prepare_model(reference, max_length)
        reference.requires_grad_(False)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    train_prompts, eval_prompts = load_prompts(config, tokenizer)
    for path, function in functions.items():
        for prompts, source in ((train_prompts.prompts, "the data"), (eval_prompts, "the held-out data")):
            if prompts:
                check_arguments(path, function, prompts[0].columns, source)
    if train_prompts.num_dropped and ranks.is_main:
        longest = config.rollout.max_prompt_length
        print(f"data: {train_prompts.num_dropped} prompts over rollout.max_prompt_length = {longest} dropped", file=sys.stderr)
    train_prompts.batch(config.run.seed, 0, config.rollout.num_prompts_per_step)  # fails now rather than at the first step
    if config.rollout.num_prompts_per_step < ranks.world_size:
        raise InputError(
            f"rollout.num_prompts_per_step: {config.rollout.num_prompts_per_step} prompts for {ranks.world_size} ranks; "
            f"give at least {ranks.world_size}"
        )
    rollout = config.rollout
    sampling = SamplingParams(
        rollout.temperature, rollout.top_p, rollout.top_k, stop_tokens(config, model, tokenizer), rollout.min_completion_length
    )
    optimizer = Optimizer(model, config.optim, config.run.max_steps, ranks)
    state = {"step": 0, "evaluated": -1}
    with _says_what_does_not_fit(checkpoint):
        if checkpoint:
            state = read_state(checkpoint)
            load_optimizer(checkpoint, optimizer)
    check_moments(optimizer, checkpoint)
    num_slots = choose_num_slots(config, model, state["step"] > 0, ranks)
    check_memory(ranks, model, num_slots, max_length)
    engine = Generator(model, num_slots, max_length, config.run.seed, rollout.max_batch_tokens, kernel)
    engine.params = sampling
    engine.rule = config.speculative.rule
    speculation = make_speculation(config, ranks, engine)
    with _says_what_does_not_fit(checkpoint):
        if checkpoint and speculation is not None and (saved := load_speculation(checkpoint)) is not None:
            speculation.load_state_dict(saved)
    lock = claim_output_dir(config, ranks)
    return Trainer(
        config=config,
        ranks=ranks,
        model=model,
        reference=reference,
        tokenizer=tokenizer,
        kernel=kernel,
        engine=engine,
        sampling=sampling,
        optimizer=optimizer,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        rewards=functions,
        reward_weights=config.reward.weights or [1.0] * len(functions),
        scorer=Scorer(config.reward, functions, tokenizer, ranks, config.run.output_dir),
        first_step=state["step"],
        num_updates=state["step"],
        saved=state["step"],
        evaluated=state["evaluated"],
        lock=lock,
        budget=TokenBudget(config.optim.max_tokens_per_microbatch),
        speculation=speculation,
    )


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptSet, list[Prompt]]:
    """Training prompts and held-out prompts. A training prompt that is also held out is left out of training, whether or not
    this run evaluates: the batches do not depend on that."""
    data, tokenize = config.data, make_tokenize(tokenizer)

    def build(rows, key: str) -> PromptSet:
        return build_prompt_set(rows, tokenize, config.rollout.max_prompt_length, data.system_prompt, data.as_chat, key)

    count = config.eval.num_prompts
    held_out = []
    if data.tasks:
        tasks = [{"name": t.name, "weight": t.weight, "config": t.config} for t in data.tasks]
        train = build(reasoning_gym_rows(tasks, data.size, data.seed), "data.tasks")
        if count:
            held_out = build(reasoning_gym_rows(tasks, count, data.seed + 500), "data.tasks").prompts
    else:
        train = build(load_rows(data.path, data.name, data.split, "data.path", data.columns), "data.path")
        if count and (data.eval_path or data.eval_split):
            key = "data.eval_path" if data.eval_path else "data.eval_split"
            name = None if data.eval_path and os.path.exists(data.eval_path) else data.name
            rows = load_rows(data.eval_path or data.path, name, data.eval_split or data.split, key, data.columns)
            held_out = build(rows, key).prompts[:count]
        elif count:
            if len(train) < 2:
                raise InputError(
                    f"data.path: {len(train)} usable prompts cannot be split into training and held-out ones (and "
                    f"{train.num_dropped} over rollout.max_prompt_length)"
                )
            held_out = train.batch(0, 0, min(count, len(train) // 2))
    if count and not held_out:
        raise InputError(f"rollout.max_prompt_length: no held-out prompt has at most {config.rollout.max_prompt_length} tokens")
    texts = {str(prompt.text) for prompt in held_out}
    kept = [prompt for prompt in train.prompts if str(prompt.text) not in texts]
    if train.prompts and not kept:
        raise InputError(
            "data.eval_path, data.eval_split: all training prompts are held out as well, so none is left to train on"
        )
    return PromptSet(kept, train.num_dropped), held_out


def generate_step(
    trainer: Trainer, rows: list[Row], step: int, on_finished: Callable[[Row], None] | None = None
) -> tuple[RolloutStats, dict]:
    """Generate this rank's rows of a step, drafting ahead where that is on. Returns its counts and its drafts.

    on_finished: called with each of the rows as it finishes. Without speculation nothing is counted, and forwards are noted only
    in the steps of run.timeline_steps. A rank that has been told to stop leaves the rollout where it is: `ranks.meet` must come
    next.
    """
    trainer.ranks.place = f"rollout of step {step}"
    if trainer.speculation is None:
        stats = RolloutStats()
        events = stats.events if step in trainer.config.run.timeline_steps else None
        generate(trainer.engine, rows, trainer.ranks, on_finished, events)
        return stats, {}
    trainer.engine.speculator = trainer.speculation.speculator
    try:
        return trainer.speculation.rollout(trainer.engine, rows, step, trainer.batch, trainer.owners, on_finished)
    finally:
        trainer.engine.speculator = None


def train_step(trainer: Trainer, samples: Samples, advantages: np.ndarray, step: int, events: list[Event]) -> dict[str, float]:
    """All updates of a step; see `train_on_samples`. It is not left half done when the run is told to stop. Raises RunFailed
    after too many steps without an update."""
    config = trainer.config
    trainer.ranks.place = f"training of step {step}"
    if config.rollout.free_cache_engine:
        trainer.engine.release()
    metrics = train_on_samples(
        trainer.model,
        trainer.reference,
        trainer.optimizer,
        samples,
        advantages,
        config,
        trainer.ranks,
        step,
        trainer.kernel,
        events,
        trainer.budget,
    )
    trainer.num_skipped_in_a_row = trainer.num_skipped_in_a_row + 1 if metrics["skipped_updates"] else 0
    if trainer.num_skipped_in_a_row > config.optim.max_skipped_steps:
        raise RunFailed(
            f"loss or gradient not finite in {trainer.num_skipped_in_a_row} steps in a row, up to step {step}; the weights are "
            "those before them. Look at optim.learning_rate, at the rewards and at model.dtype"
        )
    trainer.num_updates = step + 1
    return metrics


def save(trainer: Trainer, is_last: bool) -> None:
    """Save a checkpoint. Called by all ranks: they go on together once it is on disk. If that fails the run goes on, with a
    warning; but if this is its last save, raises SaveFailed."""
    done = trainer.num_updates
    trainer.ranks.place = f"save after {done} updates"
    speculation = trainer.speculation.state_dict() if trainer.speculation else None
    problem = save_checkpoint(
        trainer.config,
        done,
        trainer.evaluated,
        trainer.model,
        trainer.tokenizer,
        trainer.optimizer,
        speculation,
        trainer.ranks,
    )
    if problem is None:
        trainer.saved = done
        return
    newest = f"checkpoint-{trainer.saved}" if trainer.saved else "none"
    line = f"checkpoint-{done} could not be saved: {problem}; the newest checkpoint is {newest}"
    if is_last:
        raise SaveFailed(line)
    if trainer.ranks.is_main:
        say(f"warning: {line}, and the run goes on")


@contextlib.contextmanager
def stops_cleanly(trainer: Trainer, logger: MetricsLogger) -> Iterator[None]:
    """Training ends here when the run is told to stop, on all ranks alike: after an update, whose state is saved. A rollout or
    evaluation is abandoned, and made again, the same, by the continuation. Raises SaveFailed."""
    try:
        yield
    except StopRequested:
        if trainer.saved != trainer.num_updates:
            save(trainer, is_last=True)
        of = f"{trainer.num_updates} of {trainer.config.run.max_steps}"
        logger.say(f"told to stop after {of} updates; the same command goes on from there")
    finally:
        logger.close()


def evaluate_if_due(trainer: Trainer, logger: MetricsLogger) -> None:
    """Evaluate where run.eval_steps wants it; what was evaluated before the run was interrupted is not evaluated again."""
    run, done = trainer.config.run, trainer.num_updates
    is_due = run.eval_steps and (done % run.eval_steps == 0 or done == run.max_steps)
    if is_due and trainer.evaluated != done:
        logger.log_evaluation(done, evaluate(trainer))


def evaluate(trainer: Trainer) -> dict[str, float]:
    """Held-out mean reward and pass@k, under noise that is the same at every evaluation, so that curves are paired.

    pass@k is the expected best of k samples by the first reward function: for a 0/1 reward the usual unbiased estimator
    (Chen et al. 2021, arXiv 2107.03374, equation 1). Raises StopRequested, and then the evaluation is still to be made.
    """
    config, prompts = trainer.config, trainer.eval_prompts
    trainer.ranks.place = f"evaluation after {trainer.num_updates} updates"
    temperature = trainer.sampling.temperature if config.eval.temperature is None else config.eval.temperature
    own = trainer.own_share(prompts)
    rows = make_rows(own, EVALUATION, config.eval.num_generations, config.rollout.max_completion_length)
    trainer.engine.params = SamplingParams(
        temperature, trainer.sampling.top_p, trainer.sampling.top_k, trainer.sampling.stop_token_ids, trainer.sampling.min_length
    )
    scoring = trainer.scorer.begin(own, rows)
    generate(trainer.engine, rows, trainer.ranks, scoring.on_finished)
    trainer.engine.params = trainer.sampling
    trainer.ranks.meet()
    samples = gather_samples(prompts, config.eval.num_generations, rows, scoring.collect(), trainer.ranks)
    metrics = {
        "eval/reward": float(
            combine(samples.rewards, trainer.reward_weights).mean()
        ),  # the overlong penalty shapes training alone
        "eval/completions/mean_length": float(samples.lengths.mean()),
        "eval/completions/clipped_ratio": float(samples.is_truncated.mean()),
        "eval/reward/errors": trainer.scorer.take_metrics()["reward/errors"],
    }
    by_prompt = np.nan_to_num(samples.rewards[:, 0]).reshape(len(prompts), -1)
    k = 1
    while k <= config.eval.num_generations:
        metrics[f"eval/pass@{k}"] = float(np.mean([expected_best(row, k) for row in by_prompt]))
        k *= 2
    trainer.evaluated = trainer.num_updates
    return metrics


def expected_best(rewards: np.ndarray, k: int) -> float:
    """Expected maximum of k of the n rewards drawn without replacement: sum over i of r_(i) C(i-1, k-1) / C(n, k)."""
    ordered, n = np.sort(rewards), len(rewards)
    weight, total = 1.0, 0.0
    best_share = k / n  # probability that the largest is among the k drawn
    for i in range(n, k - 1, -1):
        weight = best_share if i == n else weight * (i - k + 1) / i
        total += weight * ordered[i - 1]
    return float(total)


def stop_tokens(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The configured stop tokens, or the model's and the tokenizer's end-of-sequence tokens."""
    if config.rollout.stop_token_ids is not None:
        return tuple(config.rollout.stop_token_ids)
    from_model = model.generation_config.eos_token_id
    found = {tokenizer.eos_token_id, *(from_model if isinstance(from_model, list) else [from_model])} - {None}
    if not found:
        raise InputError("rollout.stop_token_ids: neither model nor tokenizer has an end-of-sequence token; give one")
    return tuple(sorted(found))


def claim_output_dir(config: Config, ranks: Ranks) -> IO | None:
    """Rank 0 makes output_dir its own and leaves the configuration in it; where it cannot, all ranks raise what it says."""
    lock, problem = None, ""
    if ranks.is_main:
        try:
            lock = lock_output_dir(config)
        except InputError as error:
            problem = str(error)
    if answer := ranks.gather_text(problem)[0]:
        raise InputError(answer)
    return lock


def check_all_see(checkpoint: str | None, ranks: Ranks) -> None:
    """All ranks load the checkpoint that rank 0 has found. Raises InputError on all of them where some cannot see it."""
    sees = ranks.gather(np.array([checkpoint is None or os.path.isfile(os.path.join(checkpoint, STATE_FILE))], np.uint8))
    if not sees.all():
        blind = " and ".join(f"rank {rank}" for rank in np.flatnonzero(sees[:, 0] == 0))
        raise InputError(f"run.output_dir: {blind} cannot see {checkpoint}; give a folder that all machines share")


@contextlib.contextmanager
def _says_what_does_not_fit(checkpoint: str | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever is in the files: torn, of another model, or no checkpoint's at all
        raise InputError(
            f"run.resume_from_checkpoint: the state in {checkpoint} does not fit this run: {_one_line(error)}"
        ) from error


def _load_model(config: Config, checkpoint: str | None, device: torch.device) -> PreTrainedModel:
    """The policy of a checkpoint, or the initial one. With LoRA a checkpoint holds the adapter alone.

    It has the shapes that its configuration names and all of its weights: missing ones would be random numbers.
    """
    has_adapter = config.model.lora_r > 0
    path = config.model.path if has_adapter or checkpoint is None else checkpoint
    key = "model.path" if path == config.model.path else "run.resume_from_checkpoint"
    if getattr(_load(AutoConfig, config, path), "is_encoder_decoder", False):
        raise InputError(f"{key}: {path} is an encoder-decoder model; the engine serves decoder-only models")
    options = {"dtype": getattr(torch, config.model.dtype), "weights_only": True}
    model, info = _load(AutoModelForCausalLM, config, path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    if info["mismatched_keys"]:
        name, there, wanted = sorted(info["mismatched_keys"])[0]
        raise InputError(f"{key}: {name} in the weights of {path} is {list(there)}, but its config.json asks for {list(wanted)}")
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise InputError(f"{key}: the weights of {path} lack {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else ""))
    if hasattr(model, "peft_config"):
        raise InputError(
            f"model.path: {path} is a LoRA adapter; merge it into its base (merge_and_unload of peft), and save that"
        )
    if has_adapter:
        add_adapter(model, config.model, config.run.seed, checkpoint)
    return model.to(device).eval()


def _load(auto_class, config: Config, path: str, **kwargs):
    try:
        return auto_class.from_pretrained(path, trust_remote_code=config.model.trust_remote_code, **kwargs)
    except Exception as error:  # a folder of someone else's files, and a dozen libraries that read them
        if "trust_remote_code" in str(error):
            raise InputError(
                f"model.path: {path} brings code of its own, which is run only with model.trust_remote_code=true; read it first"
            ) from error
        key = "model.path" if path == config.model.path else "run.resume_from_checkpoint"
        raise InputError(f"{key}: cannot load {auto_class.__name__} from {path}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """The first sentences of an error, enough to tell what is wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'...' if text[200:] else ''}"
