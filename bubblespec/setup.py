"""Set-up of a run from its configuration, and from a checkpoint if there is one."""

import copy
import json
import time
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bubblespec import loading
from bubblespec.checkpoint import (
    PLANNER_FILE,
    SPECULATION_FILE,
    find_checkpoint,
    load_arrays,
    load_optimizer,
    lock_output_dir,
    read_state,
    refuse_what_does_not_fit,
)
from bubblespec.config import Config
from bubblespec.config.imports import import_function, without_input
from bubblespec.config.keys import is_model
from bubblespec.data.prompts import DATE, HELD_OUT, check_continued, check_equal, data_state
from bubblespec.data.schedule import PromptSet, StepSchedule
from bubblespec.distributed.ranks import Ranks
from bubblespec.distributed.shared_memory import open_collectives
from bubblespec.draft.sources import load_source
from bubblespec.engine.attention import choose_kernel
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.kv_cache import PAGE
from bubblespec.engine.model import enable_gradient_checkpointing, output_head
from bubblespec.engine.model_checks import kernel_difference, prepare_model
from bubblespec.engine.ops import HEAD, LAYERS, OPERATIONS, has_kernels
from bubblespec.engine.pages import Pages
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.trial import choose_operations, replace
from bubblespec.errors import (
    InputError,
    RunFailed,
    fallback,
    first_cause,
    is_lost,
    is_out_of_memory,
    log,
    one_line,
)
from bubblespec.learn.advantages import load_estimator
from bubblespec.learn.agreement import generation_problem, gradient_problem
from bubblespec.learn.learner import MAX_LOGITS, Learner
from bubblespec.learn.losses import Teacher, load_loss
from bubblespec.learn.optimizer import Optimizer
from bubblespec.mechanisms import Run, functions
from bubblespec.memory import choose_slots, estimate, max_length
from bubblespec.planner.stats import load_parts
from bubblespec.rewards.functions import RewardFunction, load_reward
from bubblespec.rewards.scorer import (
    RewardManager,
    Rewards,
    begin_trial,
    check_count,
    check_prompts,
    check_weights,
    end_trial,
)
from bubblespec.rollout.evaluate import Evaluator, make_evaluator
from bubblespec.rollout.make_sampler import make_sampler
from bubblespec.telemetry.files import PACKAGES, import_logger
from bubblespec.telemetry.reporter import RunReporter, show_phase
from bubblespec.trainer import Trainer, check_save_best, find_best


def build(config: Config, ranks: Ranks, is_strict: bool = False) -> Trainer:
    """Build a run on all ranks together, from its configuration and newest checkpoint.

    is_strict: whether texts and a gradient are compared with transformers' modules on CPUs as well,
    and what no fallback mends is no warning. Raises InputError for bad input, and then RunFailed.
    """
    if ranks.world_size > 1 and ranks.device.type == "cpu":
        ranks.shared = open_collectives(ranks)
    config = loading.with_dtype(config, ranks.device.type)
    began_s = time.monotonic()
    torch.manual_seed(config.run.seed)
    with show_phase(ranks, "loading the model"):
        checkpoint = find_checkpoint(config, ranks)
        state: dict = {"step": 0, "evaluated": -1}
        planner: dict[str, np.ndarray] = {}
        if checkpoint:
            state = read_state(checkpoint)
            with refuse_what_does_not_fit(checkpoint):
                planner = load_arrays(checkpoint, PLANNER_FILE)
        hooks = load_own(config, ranks)
        called = load_functions(config)
        own_s = ranks.all_gather(np.array([loading.local_time_s()]))[0]
        now_s = int(planner.get(DATE, own_s)[0])
        run = Run(config, ranks, state=state, checkpoint=checkpoint, is_strict=is_strict)
        num_tokens, lines = load_policy(run, now_s)
        tokenizer, model = run.tokenizer, run.model
        rewards, own = rewards_of(run, called)
    with show_phase(ranks, "checking the model"):
        kernel, warnings = prepare(run, model, num_tokens)
        lines += warnings
        reference = make_reference(config, model, checkpoint, ranks)
        teacher = None
        teacher_model = loading.load_teacher(config, tokenizer, num_tokens, ranks.device)
        if teacher_model is not None:
            of_teacher = prepare(run, teacher_model, num_tokens, "model.teacher_path")
            teacher = Teacher(teacher_model, kernel=of_teacher[0])
        call("prepare", run)
    warn_of(lines, ranks)
    weights = check_weights(config, run.has_reward)
    with show_phase(ranks, "reading the data"):
        warn = log if ranks.is_main else lambda line: None
        train_prompts, eval_prompts = loading.load_prompts(
            config, tokenizer, run.tokenize, saved_held_out=planner.get(HELD_OUT), warn=warn
        )
        data = data_state(tokenizer.chat_template, train_prompts.prompts, eval_prompts, now_s)
        check_equal(data, ranks.all_gather)
        base = model if config.model.lora_r else reference
        data |= loading.weights_state(base, teacher_model, *run.frozen)
        if checkpoint:
            check_continued(planner, data, checkpoint, config.run.allow_changed_data, warn)
        sources = {"the data": train_prompts.prompts, "the held-out data": eval_prompts}
        has = {"answers_turns": run.answers_turns, "has_reward": run.has_reward}
        check_prompts(config, rewards, sources, ranks, own, **has)
        check_count(config, train_prompts, ranks)
        call("check", run, train_prompts.prompts)
    params = sampling_params(run)
    with show_phase(ranks, "comparing gradients"):
        check_gradient(run, kernel, params)
    optimizer = Optimizer(model, config.optim, config.run.max_steps, ranks)
    if checkpoint:
        load_optimizer(checkpoint, optimizer)
    learner = run.learner = Learner(
        config=config,
        ranks=ranks,
        model=model,
        reference=reference,
        optimizer=optimizer,
        params=params,
        kernel=kernel,
        teacher=teacher,
        after_update=run.after_update,
        is_deterministic=(run.make_forward or ModelForward).is_invariant,
        answers_turns=run.answers_turns,
    )
    schedule = make_schedule(run, train_prompts)
    scorer = RewardManager(config.reward, rewards, tokenizer, ranks, run.has_reward, own)
    scorer.progress = (state["step"], config.run.max_steps)
    check_save_best(config, scorer.names)
    trial = {}  # in workers, the trial goes on while the engine is timed
    if ranks.is_main:
        first, size = train_prompts.prompts[0], config.rollout.num_generations
        trial = begin_trial(scorer, rewards | own, first, size)
    with show_phase(ranks, "timing the engine"):
        evaluator = make_generator(run, schedule, scorer, weights)
        sampler = run.sampler
    if checkpoint:
        with refuse_what_does_not_fit(checkpoint):
            schedule.load_state_dict(planner)
            speculation = load_arrays(checkpoint, SPECULATION_FILE)
            sampler.load_state_dict(speculation)
            load_parts(evaluator.parts(), speculation)
    ranks.run_on_rank0(lambda: end_trial(scorer, trial))
    locks: list[IO] = []  # of rank 0; its error is raised on all ranks
    ranks.run_on_rank0(lambda: locks.append(lock_output_dir(config, state["step"])))
    best = ranks.run_on_rank0(lambda: find_best(config, state))
    names, hook = scorer.names, hooks[0] if hooks else None
    reporter = RunReporter(
        config, ranks, learner, schedule, tokenizer, names, len(eval_prompts), hook, began_s
    )
    return Trainer(
        config=config,
        ranks=ranks,
        learner=learner,
        sampler=sampler,
        evaluator=evaluator,
        reporter=reporter,
        tokenizer=tokenizer,
        data=data,
        eval_prompts=eval_prompts,
        checkpoint=checkpoint,
        chosen=run.chosen,
        lock=locks[0] if locks else None,
        num_updates=state["step"],
        saved=state["step"],
        evaluated=state["evaluated"],
        best=best,
        **state.get("progress", {}),
    )


def load_functions(config: Config) -> dict[str, RewardFunction]:
    """Load the functions that score responses, by path, without models. Raises InputError."""
    called: dict[str, RewardFunction] = {}
    for key, paths in (("reward", config.reward.functions), ("eval", config.eval.functions)):
        of_key = [path for path in paths if not is_model(path)]
        called |= {path: load_reward(path, f"{key}.functions") for path in of_key}
    return called


def rewards_of(run: Run, called: dict[str, RewardFunction]) -> tuple[Rewards, Rewards]:
    """Return what scores responses in training and what does in evaluations alone, by path.

    called: of `load_functions`; models are the run's."""
    known: Rewards = {**called, **run.rewards}
    config = run.config
    paths = config.reward.functions, config.eval.functions
    rewards, own = ({path: known[path] for path in of} for of in paths)
    return rewards, own


def load_policy(run: Run, now_s: int) -> tuple[int, list[str]]:
    """Load the run's model and tokenizer, from its checkpoint if it has one. Raises InputError.

    now_s: see `load_tokenizer`. Return what `check_vocabulary` does."""
    config, run.now_s = run.config, now_s
    run.tokenizer = loading.load_tokenizer(config, now_s)
    run.model = loading.load_model(config, run.checkpoint, run.ranks.device)
    loading.keep_heads(config, run.model, run.checkpoint)
    found = loading.check_vocabulary(config, run.model, run.tokenizer)
    call("load", run)
    return found


def sampling_params(run: Run) -> SamplingParams:
    """Return the distribution that a run's responses are sampled from."""
    rollout, stops = run.config.rollout, loading.stop_tokens(run.config, run.model, run.tokenizer)
    shortest = rollout.min_completion_length
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, stops, shortest)


def make_generator(
    run: Run, schedule: StepSchedule, scorer: RewardManager, weights: list[float]
) -> Evaluator:
    """Build the engine, the run's sampler and its mechanisms; return its evaluator."""
    run.sampler = make_sampler(
        run.config,
        run.ranks,
        build_agreeing_engine(run),
        run.learner.params,
        schedule,
        scorer,
        reward_weights=weights,
        drafts_ahead=run.drafts_ahead,
    )
    add_mechanisms(run)
    return make_evaluator(run.sampler)


def call(name: str, *given) -> None:
    """Call the mechanisms' functions of this name."""
    for function in functions(name):
        function(*given)


def add_mechanisms(run: Run) -> None:
    """Make the run's mechanisms; those that take part in rollouts go to its sampler."""
    for make in functions("make"):
        if (mechanism := make(run)) is not None:
            run.sampler.mechanisms.append(mechanism)


def load_own(config: Config, ranks: Ranks) -> list[Any]:
    """Import the user's functions, to find mistakes early; return that of run.log_to on rank 0.

    It is the hook, or the module of a package. Raises InputError."""
    loss, log_to = config.loss, config.run.log_to
    hooks: list[Any] = []
    if "." in loss.advantage_estimator:
        load_estimator(loss.advantage_estimator)
    if "." in loss.loss_type:
        load_loss(loss.loss_type)
    for path in config.speculative.sources:
        if "." in path:
            load_source(path, None)

    if log_to is not None:
        load = partial(import_function, "run.log_to", log_to, "my_module.log", ("metrics",))
        if log_to in PACKAGES:
            load = partial(import_logger, log_to)
        with without_input():
            ranks.run_on_rank0(lambda: hooks.append(load()))
    return hooks


def prepare(
    run: Run, model: PreTrainedModel, num_tokens: int | None = None, key: str = "model.path"
) -> tuple[str, list[str]]:
    """Prepare the model for packed forwards; return the kernel of training, see `choose_kernel`.

    Also return warnings of what is slower than it could be. num_tokens: see `prepare_model`; key:
    of the model's path; the policy's comes first. Raises InputError for a model that the engine
    cannot serve."""
    config, ranks, lines = run.config, run.ranks, list[str]()
    try:
        if key == "model.path":
            has_teacher = config.model.teacher_path is not None
            kernels, gather = config.model.kernels, ranks.gather_text
            lines += choose_operations(kernels, model, has_teacher, gather)
        head_sizes = prepare_model(model, max_length(config), num_tokens)
        if config.model.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        difference_of = partial(kernel_difference, model)
        attention = run.attention or config.model.attention
        kernel, slower = choose_kernel(
            attention, model, head_sizes, difference_of, ranks.gather_text
        )
        if slower is not None:
            lines.append(f"warning: {slower}")
        return kernel, lines
    except ValueError as error:  # the engine raises these for input errors, without their key
        names_key = str(error).startswith(("rollout.", "model."))
        raise InputError(str(error) if names_key else f"{key}: {error}") from error


def make_reference(
    config: Config, model: PreTrainedModel, checkpoint: str | None, ranks: Ranks
) -> PreTrainedModel | None:
    """Return the initial policy for the KL term, if any; with LoRA the adapter is off."""
    if config.loss.kl_coef == 0:
        return None
    if config.model.lora_r:
        return model
    device = ranks.device
    reference = loading.load_model(config, None, device) if checkpoint else copy.deepcopy(model)
    prepare_model(reference, max_length(config), output_head(model).num_tokens)
    return reference.requires_grad_(False)


def check_gradient(run: Run, kernel: str, params: SamplingParams) -> None:
    """Compare a gradient by kernels with one by transformers' modules; else let torch compute.

    kernel: of attention. Raises InputError where model.kernels allows kernels alone."""
    config, model, ranks, kernels = run.config, run.model, run.ranks, (LAYERS, HEAD)
    has_own = any(has_kernels(model.device, model.dtype, own) for own in kernels)
    if ranks.device.type != "cuda" and not has_own and not run.is_strict:
        return
    given = model, kernel, params, max_length(config), MAX_LOGITS
    problem = agree(partial(gradient_problem, *given), ranks)
    if problem is not None and config.model.kernels == "triton":
        raise InputError(f"model.kernels: triton, but {problem}; set auto")
    if problem is not None and has_own:
        warn_of(replace(kernels, problem), ranks)
        problem = agree(partial(gradient_problem, *given), ranks)
    if problem is not None:
        tell(f"with attention by {kernel} {problem}", run)


def tell(problem: str, run: Run) -> None:
    """Warn of a difference that torch's operations have, too, or raise RunFailed.

    Bounds of rounding are no proof, and drafts are still verified by what samples."""
    if run.is_strict:
        raise RunFailed(problem)
    warn_of([f"warning: {problem}"], run.ranks)


def build_agreeing_engine(run: Run) -> Engine:
    """Return `build_engine`'s first result whose texts agree with transformers' modules.

    With CUDA graphs, then eager, then by torch's operations, whose differences are a warning.
    Raises InputError where model.kernels allows kernels alone."""
    config, learner, ranks = run.config, run.learner, run.ranks
    while True:
        engine = build_engine(run)
        forward = engine.runner.forward
        own = ranks.device.type == "cuda" or has_kernels(*forward.type)
        if not own and not run.is_strict:
            return engine
        problem = agree(partial(generation_problem, engine.runner, learner.params), ranks)
        if problem is None:
            return engine
        if config.model.kernels == "triton":
            raise InputError(f"model.kernels: triton, but {problem}; set auto")
        engine.release()
        if not forward.is_eager:
            config.rollout.enforce_eager = True
            line = fallback("forwards are eager", problem, "rollout.enforce_eager=true")
            warn_of([f"warning: {line}"], ranks)
        elif has_kernels(*forward.type):
            warn_of(replace(OPERATIONS, problem), ranks)
        else:
            tell(f"{problem}, also by torch's operations", run)
            return engine


def agree(find: Callable[[], str | None], ranks: Ranks) -> str | None:
    """Return the problem that a comparison finds on the first rank with one; errors are problems.

    But memory that runs out is a warning, as a run may take less. Raises InputError where a GPU is
    lost."""
    kind, own = "problem", None
    try:
        own = find()
    except Exception as error:  # of a kernel, a driver
        own = one_line(first_cause(error))
        kind = "lost" if is_lost(error) else "memory" if is_out_of_memory(error) else kind
    of_ranks = [json.loads(text) for text in ranks.gather_text(json.dumps([kind, own]))]
    first = {kind: text for kind, text in reversed(of_ranks) if text}
    if "lost" in first:
        raise InputError(f"model.kernels: {first['lost']}; set torch")
    if "memory" in first:
        warn_of([f"warning: not compared with transformers' modules: {first['memory']}"], ranks)
    return first.get("problem")


def warn_of(lines: list[str], ranks: Ranks) -> None:
    """Print lines on rank 0."""
    for line in lines if ranks.is_main else []:
        log(line)


def build_engine(run: Run) -> Engine:
    """Return the engine, in the memory that is free now; note the rows of all ranks together."""
    config, learner, ranks = run.config, run.learner, run.ranks
    model, length = learner.model, max_length(config)
    needs = estimate(config, model, ranks.world_size, learner.teacher and learner.teacher.model)
    for add in functions("add_needs"):
        needs = add(needs, run)
    num_slots, num_pages, run.num_shared_rows = choose_slots(config, learner, ranks, needs)
    make = run.make_forward or ModelForward
    runner = ModelRunner(
        model,
        num_slots,
        length,
        config.run.seed,
        forward=make(model, enforce_eager=config.rollout.enforce_eager),
        max_num_batched_tokens=config.rollout.max_num_batched_tokens,
        pages=num_pages and Pages.for_rows(num_slots, length, PAGE, num_pages),
    )
    return Engine(runner)


def make_schedule(run: Run, prompts: PromptSet) -> StepSchedule:
    """Return the rule for which groups make up a step."""
    rollout, make = run.config.rollout, run.make_schedule or StepSchedule
    num_prompts, size = rollout.num_prompts_per_step, rollout.num_generations
    return make(prompts, run.config.run.seed, num_prompts, size)
