"""A run is set up: model, data, rewards and engine loaded, checked, and continued from a checkpoint
if there is one."""

import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from typing import IO

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bubblespec import set_up_drafter
from bubblespec.checkpoint import (
    PLANNER_FILE,
    SPECULATION_FILE,
    STATE_FILE,
    find_checkpoint,
    load_arrays,
    load_optimizer,
    lock_output_dir,
    read_state,
)
from bubblespec.checks import check_memory, check_moments, check_same_architecture, check_vocabulary
from bubblespec.config import Config
from bubblespec.data.prompts import (
    PromptSet,
    build_prompt_set,
    load_rows,
    make_tokenize,
    reasoning_gym_rows,
)
from bubblespec.data.schedule import InOrder, StepSchedule
from bubblespec.data.tail_batching import TailBatching
from bubblespec.dist.ranks import Ranks
from bubblespec.engine.attention import choose_kernel
from bubblespec.engine.engine import Engine
from bubblespec.engine.linear import (
    Plan,
    can_choose,
    choose,
    measure,
    measured_layers,
    read_plans,
    use_plans,
)
from bubblespec.engine.model import enable_gradient_checkpointing, prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError, log
from bubblespec.learn.learner import Learner
from bubblespec.learn.lora import add_adapter
from bubblespec.learn.optimizer import Optimizer
from bubblespec.learn.streaming import GradientStream
from bubblespec.memory import choose_num_slots, choose_tp_rows
from bubblespec.rewards.functions import check_arguments, load_reward
from bubblespec.rewards.scorer import Scorer
from bubblespec.rollout.make_sampler import make_sampler
from bubblespec.rollout.tp_tail import make_tp_tail
from bubblespec.telemetry.trace import describe_hardware
from bubblespec.trainer import Trainer
from bubblespec.types import Prompt


def build(config: Config, ranks: Ranks) -> Trainer:
    """Load model, data and rewards, and continue from a checkpoint if there is one. Raises
    InputError for bad input."""
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
        head_sizes = prepare_model(model, max_length)
        if config.model.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        kernel = choose_kernel(config.model.attention, ranks.device, model.dtype, head_sizes)
    except (
        ValueError
    ) as error:  # the engine's own word for input errors: it knows nothing of this package's
        names_key = str(error).startswith(("rollout.", "model."))
        raise InputError(str(error) if names_key else f"model.path: {error}") from error
    reference = None
    if config.loss.kl_coef > 0 and config.model.lora_r:
        reference = model  # with its adapter off
    elif config.loss.kl_coef > 0:
        reference = _load_model(config, None, ranks.device) if checkpoint else copy.deepcopy(model)
        prepare_model(reference, max_length)
        reference.requires_grad_(False)
    train_prompts, eval_prompts = load_prompts(config, tokenizer)
    for path, function in functions.items():
        for prompts, source in (
            (train_prompts.prompts, "the data"),
            (eval_prompts, "the held-out data"),
        ):
            if prompts:
                check_arguments(path, function, prompts[0].columns, source)
    if train_prompts.num_dropped and ranks.is_main:
        longest = config.rollout.max_prompt_length
        print(
            f"data: {train_prompts.num_dropped} prompts over rollout.max_prompt_length = {longest} dropped",
            file=sys.stderr,
        )
    if (
        config.tail_batching.enabled
        and config.tail_batching.response_over_sampling_ratio > 1
        and ranks.is_main
    ):
        log(
            "warning: tail_batching.response_over_sampling_ratio: a race within prompts trains on the shortest of their "
            "responses, which are no fair sample of what the policy says; 1 is free of that bias"
        )
    train_prompts.batch(
        config.run.seed, 0, config.rollout.num_prompts_per_step
    )  # fails now rather than at the first step
    if config.rollout.num_prompts_per_step < ranks.world_size:
        raise InputError(
            f"rollout.num_prompts_per_step: {config.rollout.num_prompts_per_step} prompts for {ranks.world_size} ranks; "
            f"give at least {ranks.world_size}"
        )
    rollout = config.rollout
    sampling = SamplingParams(
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        stop_tokens(config, model, tokenizer),
        rollout.min_completion_length,
    )
    optimizer = Optimizer(model, config.optim, config.run.max_steps, ranks)
    state = {"step": 0, "evaluated": -1}
    with _says_what_does_not_fit(checkpoint):
        if checkpoint:
            state = read_state(checkpoint)
            load_optimizer(checkpoint, optimizer)
    check_moments(optimizer, checkpoint)
    linear = choose_linear(config, ranks, model, state.get("linear"))
    if linear is not None:
        plans = read_plans(linear)
        use_plans(model, plans)
        if reference not in (None, model):  # it generates nothing
            use_plans(reference, {shape: Plan(trains=plan.trains) for shape, plan in plans.items()})
    num_slots = choose_num_slots(config, model, state["step"] > 0, ranks)
    check_memory(config, ranks, model, num_slots)
    runner = ModelRunner(
        model,
        num_slots,
        max_length,
        config.run.seed,
        max_batch_tokens=rollout.max_batch_tokens,
        kernel=kernel,
        rule=config.speculative.rule,
        enforce_eager=rollout.enforce_eager,
    )
    engine = Engine(runner)
    shared_rows = (
        choose_tp_rows(config, model, state["step"] > 0, num_slots, ranks)
        if rollout.tp_tail_max_rows
        else 0
    )
    schedule = make_schedule(config, train_prompts)
    with _says_what_does_not_fit(checkpoint):
        if checkpoint:
            schedule.load_state_dict(np.load(os.path.join(checkpoint, PLANNER_FILE)))
    learner = Learner(
        config=config,
        ranks=ranks,
        model=model,
        reference=reference,
        optimizer=optimizer,
        kernel=kernel,
    )
    scorer = Scorer(config.reward, functions, tokenizer, ranks, output_dir=config.run.output_dir)
    weights = config.reward.weights or [1.0] * len(functions)
    parts = (config, ranks, engine, sampling, schedule, scorer)
    sampler = make_sampler(*parts, reward_weights=weights)
    with _says_what_does_not_fit(checkpoint):
        saved = load_arrays(checkpoint, SPECULATION_FILE) if checkpoint else None
        if saved is not None:
            sampler.load_state_dict(saved)
    if config.optim.stream_gradients:
        sampler.stream = GradientStream(learner)
    sampler.tail = make_tp_tail(config, sampler, max_rows=shared_rows)
    if (
        "drafter" in config.speculative.method
        and (found := set_up_drafter.find(config, checkpoint, ranks)) is not None
    ):
        folder, key = found
        set_up_drafter.load(folder, sampler, learner, key, read_plans(linear))
    lock = claim_output_dir(config, ranks)
    return Trainer(
        config=config,
        ranks=ranks,
        learner=learner,
        sampler=sampler,
        tokenizer=tokenizer,
        eval_prompts=eval_prompts,
        rewards=functions,
        num_updates=state["step"],
        saved=state["step"],
        evaluated=state["evaluated"],
        linear=linear,
        lock=lock,
    )


def choose_linear(
    config: Config, ranks: Ranks, model: PreTrainedModel, saved: dict | None
) -> dict | None:
    """Which kernels linear layers use, the same on all ranks, as checkpoints keep it: {"hardware":
    ..., "plans": by shape}; None where there is no choice. saved: that of the checkpoint; a
    continuation on the same processor keeps it, as other kernels would round differently."""
    if config.model.cpu_linear == "torch" or not can_choose(model):
        return None
    hardware = describe_hardware(ranks.device)
    is_kept = saved is not None and saved["hardware"] == hardware
    if ranks.gather(np.array([is_kept], np.uint8)).all():
        return saved
    seconds = np.exp(np.log(ranks.gather(measure(model))).mean(axis=0))
    return {"hardware": hardware, "plans": choose(list(measured_layers(model)), seconds)}


def make_schedule(config: Config, prompts: PromptSet) -> StepSchedule:
    """The rule for what makes up a step."""
    rollout, tail = config.rollout, config.tail_batching
    order = (prompts, config.run.seed, rollout.num_prompts_per_step, rollout.num_generations)
    if not tail.enabled:
        return InOrder(*order)
    ratios = {key: value for key, value in vars(tail).items() if key != "enabled"}
    return TailBatching(*order, **ratios)


def load_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[PromptSet, list[Prompt]]:
    """Training prompts and held-out prompts. A training prompt that is also held out is left out of
    training, whether or not this run evaluates: the batches do not depend on that."""
    data, tokenize = config.data, make_tokenize(tokenizer)

    def build(rows, key: str) -> PromptSet:
        return build_prompt_set(
            rows,
            tokenize,
            config.rollout.max_prompt_length,
            system_prompt=data.system_prompt,
            as_chat=data.as_chat,
            key=key,
        )

    count = config.eval.num_prompts
    held_out = []
    if data.tasks:
        tasks = [{"name": t.name, "weight": t.weight, "config": t.config} for t in data.tasks]
        train = build(reasoning_gym_rows(tasks, data.size, data.seed), "data.tasks")
        if count:
            held_out = build(
                reasoning_gym_rows(tasks, count, data.seed + 500), "data.tasks"
            ).prompts
    else:
        train = build(
            load_rows(data.path, data.name, data.split, columns=data.columns), "data.path"
        )
        if count and (data.eval_path or data.eval_split):
            key = "data.eval_path" if data.eval_path else "data.eval_split"
            name = None if data.eval_path and os.path.exists(data.eval_path) else data.name
            rows = load_rows(
                data.eval_path or data.path,
                name,
                data.eval_split or data.split,
                key=key,
                columns=data.columns,
            )
            held_out = build(rows, key).prompts[:count]
        elif count:
            if len(train) < 2:
                raise InputError(
                    f"data.path: {len(train)} usable prompts cannot be split into training and held-out ones (and "
                    f"{train.num_dropped} over rollout.max_prompt_length)"
                )
            held_out = train.batch(0, 0, min(count, len(train) // 2))
    if count and not held_out:
        raise InputError(
            f"rollout.max_prompt_length: no held-out prompt has at most {config.rollout.max_prompt_length} tokens"
        )
    texts = {str(prompt.text) for prompt in held_out}
    remaining = [prompt for prompt in train.prompts if str(prompt.text) not in texts]
    if train.prompts and not remaining:
        raise InputError(
            "data.eval_path, data.eval_split: all training prompts are held out as well, so none is left to train on"
        )
    return PromptSet(remaining, train.num_dropped), held_out


def stop_tokens(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The configured stop tokens, or the model's and the tokenizer's end-of-sequence tokens."""
    if config.rollout.stop_token_ids is not None:
        return tuple(config.rollout.stop_token_ids)
    from_model = model.generation_config.eos_token_id
    stops = {
        tokenizer.eos_token_id,
        *(from_model if isinstance(from_model, list) else [from_model]),
    } - {None}
    if not stops:
        raise InputError(
            "rollout.stop_token_ids: neither model nor tokenizer has an end-of-sequence token; give one"
        )
    return tuple(sorted(stops))


def claim_output_dir(config: Config, ranks: Ranks) -> IO | None:
    """Rank 0 makes output_dir its own and leaves the configuration in it; where it cannot, all
    ranks raise what it says."""
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
    """All ranks load the checkpoint that rank 0 has found. Raises InputError on all of them where
    some cannot see it."""
    sees = ranks.gather(
        np.array(
            [checkpoint is None or os.path.isfile(os.path.join(checkpoint, STATE_FILE))], np.uint8
        )
    )
    if not sees.all():
        blind = " and ".join(f"rank {rank}" for rank in np.flatnonzero(sees[:, 0] == 0))
        raise InputError(
            f"run.output_dir: {blind} cannot see {checkpoint}; give a folder that all machines share"
        )


@contextlib.contextmanager
def _says_what_does_not_fit(checkpoint: str | None) -> Iterator[None]:
    try:
        yield
    except (
        Exception
    ) as error:  # whatever is in the files: torn, of another model, or no checkpoint's at all
        raise InputError(
            f"run.resume_from_checkpoint: the state in {checkpoint} does not fit this run: {_one_line(error)}"
        ) from error


def _load_model(config: Config, checkpoint: str | None, device: torch.device) -> PreTrainedModel:
    """The policy of a checkpoint, or the initial one. With LoRA a checkpoint holds the adapter
    alone.

    It has the shapes that its configuration names and all of its weights: missing ones would be
    random numbers.
    """
    has_adapter = config.model.lora_r > 0
    path = config.model.path if has_adapter or checkpoint is None else checkpoint
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        raise InputError(
            f"model.path: {path} is a LoRA adapter; merge it into its base (merge_and_unload of peft), and save that"
        )
    key = "model.path" if path == config.model.path else "run.resume_from_checkpoint"
    if getattr(_load(AutoConfig, config, path), "is_encoder_decoder", False):
        raise InputError(
            f"{key}: {path} is an encoder-decoder model; the engine serves decoder-only models"
        )
    # Each tensor goes from the file to the device at once: the ranks of a machine never hold their
    # models in its memory together.
    options = {"dtype": getattr(torch, config.model.dtype), "device_map": {"": device}}
    model, info = _load(
        AutoModelForCausalLM,
        config,
        path,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    if info["mismatched_keys"]:
        name, there, wanted = sorted(info["mismatched_keys"])[0]
        raise InputError(
            f"{key}: {name} in the weights of {path} is {list(there)}, but its config.json asks for {list(wanted)}"
        )
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise InputError(
            f"{key}: the weights of {path} lack {names[0]}"
            + (f" and {len(names) - 1} more" if names[1:] else "")
        )
    if has_adapter:
        add_adapter(model, config.model, config.run.seed, checkpoint)
    return model.to(device).eval()


def _load(auto_class, config: Config, path: str, **kwargs):
    try:
        return auto_class.from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code, **kwargs
        )
    except (
        Exception
    ) as error:  # a folder of someone else's files, and a dozen libraries that read them
        if "trust_remote_code" in str(error):
            raise InputError(
                f"model.path: {path} brings code of its own, which is run only with model.trust_remote_code=true; read it first"
            ) from error
        key = "model.path" if path == config.model.path else "run.resume_from_checkpoint"
        raise InputError(
            f"{key}: cannot load {auto_class.__name__} from {path}: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    """The first sentences of an error, enough to tell what is wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{'...' if text[200:] else ''}"
