"""Everything a run holds, how it is set up, and its evaluation. The loop itself is in train.py."""

import contextlib
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bubblespec.checkpoint import (
    SaveFailed,
    find_checkpoint,
    load_optimizer,
    load_speculation,
    lock_output_dir,
    read_state,
    save_checkpoint,
)
from bubblespec.config import Config
from bubblespec.data import Prompt, PromptSet, build_prompt_set, load_rows, make_tokenize, reasoning_gym_rows
from bubblespec.distributed import Ranks, StopRequested
from bubblespec.engine.attention import choose_kernel
from bubblespec.engine.generator import Generator, Row
from bubblespec.engine.model import enable_gradient_checkpointing, prepare_model
from bubblespec.engine.noise import EVALUATION
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError, say
from bubblespec.metrics import MetricsLogger
from bubblespec.optimizer import Optimizer
from bubblespec.rewards import RewardFunction, combine, load_reward
from bubblespec.rollout import Samples, assign_prompts, gather_samples, generate, make_rows, score_rows
from bubblespec.schedule.run_ahead import RolloutStats
from bubblespec.schedule.speculation import Speculation, make_speculation
from bubblespec.timeline import Event
from bubblespec.update import train_on_samples


@dataclass
class Trainer:
    """The parts of a run, and how far it is.

    first_step: updates already done by the run that this one continues; num_updates: those done by now; saved: those in the
    newest checkpoint; evaluated: those before the last evaluation, or -1.
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
    first_step: int
    num_updates: int
    saved: int
    evaluated: int
    lock: IO | None  # keeps output_dir ours; on rank 0
    speculation: Speculation | None = None

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
        """Weighted reward of each sample, float64 [S]."""
        return combine(samples.rewards, self.reward_weights)


def set_up(config: Config, ranks: Ranks) -> Trainer:
    """Load model, data and rewards, and continue from a checkpoint if there is one. Raises InputError for bad input."""
    torch.manual_seed(config.run.seed)
    checkpoint = find_checkpoint(config, ranks)
    functions = {path: load_reward(path) for path in config.reward.functions}
    tokenizer = _load(AutoTokenizer, config, config.model.path)
    model = _load_model(config, checkpoint or config.model.path, ranks.device)
    max_length = config.rollout.max_prompt_length + config.rollout.max_completion_length
    try:
        prepare_model(model, max_length)
        kernel = choose_kernel(config.model.attention, ranks.device)
    except ValueError as error:  # the engine's own word for input errors: it knows nothing of this package's
        raise InputError(str(error)) from error
    reference = None
    if config.loss.kl_coef > 0:
        reference = _load_model(config, config.model.path, ranks.device) if checkpoint else copy.deepcopy(model)
        prepare_model(reference, max_length)
        reference.requires_grad_(False)
    if config.model.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    train_prompts, eval_prompts = load_prompts(config, tokenizer)
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
    num_slots = rollout.num_slots
    if "bubble" not in config.speculative.method:  # slots beyond the rank's own rows are for drafts
        num_slots = min(num_slots, -(-rollout.num_prompts_per_step // ranks.world_size) * rollout.num_generations)
    engine = Generator(model, num_slots, max_length, config.run.seed, rollout.max_batch_tokens, kernel)
    engine.params = sampling
    engine.rule = config.speculative.rule
    speculation = make_speculation(config, ranks, engine)
    optimizer = Optimizer(model, config.optim, config.run.max_steps)
    state = {"step": 0, "evaluated": -1}
    if checkpoint:
        state = read_state(checkpoint)
        load_optimizer(checkpoint, optimizer, ranks.device)
    if checkpoint and speculation is not None and (saved := load_speculation(checkpoint)) is not None:
        speculation.load_state_dict(saved)
    lock = lock_output_dir(config) if ranks.is_main else None
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
        first_step=state["step"],
        num_updates=state["step"],
        saved=state["step"],
        evaluated=state["evaluated"],
        lock=lock,
        speculation=speculation,
    )


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptSet, list[Prompt]]:
    """Training prompts and held-out prompts. A training prompt that is also held out is left out of training, whether or not
    this run evaluates: the batches do not depend on that."""
    data, tokenize = config.data, make_tokenize(tokenizer)

    def build(rows) -> PromptSet:
        return build_prompt_set(rows, tokenize, config.rollout.max_prompt_length, data.system_prompt, data.as_chat)

    count = config.eval.num_prompts
    held_out = []
    if data.tasks:
        tasks = [{"name": t.name, "weight": t.weight, "config": t.config} for t in data.tasks]
        train = build(reasoning_gym_rows(tasks, data.size, data.seed))
        if count:
            held_out = build(reasoning_gym_rows(tasks, count, data.seed + 500)).prompts
    else:
        train = build(load_rows(data.path, data.name, data.split))
        if count and (data.eval_path or data.eval_split):
            rows = load_rows(data.eval_path or data.path, data.name, data.eval_split or data.split)
            held_out = build(rows).prompts[:count]
        elif count:
            if len(train) < 2:
                raise InputError(f"data.path: {len(train)} usable prompts cannot be split into training and held-out ones")
            held_out = train.batch(0, 0, min(count, len(train) // 2))
    if count and not held_out:
        raise InputError(f"rollout.max_prompt_length: no held-out prompt has at most {config.rollout.max_prompt_length} tokens")
    texts = {str(prompt.text) for prompt in held_out}
    kept = [prompt for prompt in train.prompts if str(prompt.text) not in texts]
    return PromptSet(kept, train.num_dropped), held_out


def generate_step(trainer: Trainer, rows: list[Row], step: int) -> tuple[RolloutStats, dict]:
    """Generate this rank's rows of a step, drafting ahead where that is on. Returns its counts and its drafts.

    Without speculation nothing is counted, and forwards are noted only in the steps of run.timeline_steps. A rank that has been
    told to stop leaves the rollout where it is: `ranks.meet` must come next.
    """
    trainer.ranks.place = f"rollout of step {step}"
    if trainer.speculation is None:
        stats = RolloutStats()
        generate(trainer.engine, rows, trainer.ranks, stats.events if step in trainer.config.run.timeline_steps else None)
        return stats, {}
    trainer.engine.speculator = trainer.speculation.speculator
    try:
        return trainer.speculation.rollout(trainer.engine, rows, step, trainer.batch, trainer.owners)
    finally:
        trainer.engine.speculator = None


def train_step(trainer: Trainer, samples: Samples, advantages: np.ndarray, step: int, events: list[Event]) -> dict[str, float]:
    """All updates of a step; see `train_on_samples`. It is not left half done when the run is told to stop."""
    trainer.ranks.place = f"training of step {step}"
    metrics = train_on_samples(
        trainer.model,
        trainer.reference,
        trainer.optimizer,
        samples,
        advantages,
        trainer.config,
        trainer.ranks,
        step,
        trainer.kernel,
        events,
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
    generate(trainer.engine, rows, trainer.ranks)
    trainer.engine.params = trainer.sampling
    trainer.ranks.meet()
    scores = score_rows(trainer.rewards, own, rows, trainer.tokenizer)
    samples = gather_samples(prompts, config.eval.num_generations, rows, scores, trainer.ranks)
    metrics = {
        "eval/reward": float(trainer.combined(samples).mean()),
        "eval/completions/mean_length": float(samples.lengths.mean()),
        "eval/completions/clipped_ratio": float(samples.is_truncated.mean()),
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


def _load_model(config: Config, path: str, device: torch.device) -> PreTrainedModel:
    model = _load(AutoModelForCausalLM, config, path, dtype=getattr(torch, config.model.dtype))
    return model.to(device).eval()


def _load(auto_class, config: Config, path: str, **kwargs):
    try:
        return auto_class.from_pretrained(path, trust_remote_code=config.model.trust_remote_code, **kwargs)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputError(f"model.path: cannot load {auto_class.__name__} from {path}: {first_line}") from error
