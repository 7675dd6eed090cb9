"""Conditions on several configuration keys together, which bounds of single keys cannot express."""

from collections.abc import Iterator

from bubblespec.config.keys import last_part
from bubblespec.metrics import row_of

# Sources of drafts that speculative.method may name.
METHODS = ("bubble", "suffix", "quantized", "drafter")
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "cispo", "distillation")
CLIPS = ("loss.epsilon_low", "loss.epsilon_high", "loss.delta")
# Keys without effect where rewards are not trained on.
OF_REWARDS = ("loss.advantage_estimator", "loss.scale_rewards", "loss.importance_sampling_level")
OF_REWARDS += ("loss.distillation_coef", "rollout.dynamic_sampling_max_batches")
OF_REWARDS += ("reward.overlong_buffer_length", *CLIPS)


def combination_problems(config) -> Iterator[str]:
    """Yield a line for each, with the key and its nearest valid value."""
    for holds, name, what in _conditions(config):
        if not holds:
            section, _, key = name.partition(".")
            yield f"{name}: {getattr(getattr(config, section), key)} must be {what}"
    of_sections = (_loss_problems, _reward_problems, _data_problems, _environment_problems)
    for problems in (*of_sections, _streaming_problems):
        yield from problems(config)


def _conditions(config) -> Iterator[tuple[bool, str, str]]:
    rollout, reward, names = config.rollout, config.reward, config.speculative.sources
    num_prompts, max_response = rollout.num_prompts_per_step, rollout.max_completion_length
    slots, total = rollout.max_num_seqs, rollout.max_prompt_length + max_response
    longer = max(("max_completion_length", "max_prompt_length"), key=vars(rollout).get)
    what = f"below {1 << 20}, prompt and response together"
    yield total <= 1 << 20, f"rollout.{longer}", what
    limit = f"at most rollout.max_completion_length = {max_response}"
    shortest, buffer = rollout.min_completion_length, reward.overlong_buffer_length
    yield shortest <= max_response, "rollout.min_completion_length", limit
    yield buffer <= max_response, "reward.overlong_buffer_length", limit
    what = f"at least rollout.max_num_seqs = {slots}, so that every row can decode in one forward"
    holds = slots == "auto" or rollout.max_num_batched_tokens >= slots
    yield holds, "rollout.max_num_batched_tokens", what
    what = f"at least {total}, so that the longest prompt and response fit"
    holds = config.optim.max_tokens_per_microbatch >= total
    yield holds, "optim.max_tokens_per_microbatch", what
    what = f"at least rollout.num_prompts_per_step = {num_prompts}"
    yield config.data.size >= num_prompts or not config.data.tasks, "data.size", what
    holds = rollout.tp_tail_max_rows in ("auto", 0) or not config.model.batch_invariant
    yield holds, "rollout.tp_tail_max_rows", "0 with model.batch_invariant=true"
    what = f"a divisor of rollout.num_prompts_per_step = {num_prompts}"
    yield num_prompts % config.loss.num_minibatches == 0, "loss.num_minibatches", what
    holds = all(name in METHODS or "." in name for name in names) and len(set(names)) == len(names)
    what = f"auto, none, or some of {', '.join(METHODS)} and dotted paths, joined by +"
    yield holds, "speculative.method", what
    yield len(config.optim.adam_betas) == 2, "optim.adam_betas", "two numbers"
    holds = bool(config.eval.num_prompts or not config.run.eval_steps)
    yield holds, "eval.num_prompts", "at least 1, as run.eval_steps is set"
    holds = bool(config.run.eval_steps or not config.eval.functions)
    yield holds, "eval.functions", "empty, as run.eval_steps is 0"
    holds = bool(config.run.eval_steps or config.run.save_best is None)
    yield holds, "run.save_best", "null, as run.eval_steps is 0"
    for name, valid in (("advantage_estimator", ESTIMATORS), ("loss_type", LOSS_TYPES)):
        value, what = getattr(config.loss, name), f"{', '.join(valid)}, or a dotted path"
        yield value in valid or "." in value, f"loss.{name}", what


def _loss_problems(config) -> Iterator[str]:
    loss, rollout = config.loss, config.rollout
    estimator, delta, high = loss.advantage_estimator, loss.delta, loss.epsilon_high
    is_own = "." in estimator
    yield from _teacher_problems(config)
    if loss.loss_type == "distillation":
        return
    if rollout.num_generations == 1 and rollout.dynamic_sampling_max_batches > 1:
        needs = "needs rollout.num_generations of at least 2"
        yield f"rollout.dynamic_sampling_max_batches: above 1 {needs}"
    if rollout.num_generations == 1 and estimator != "reinforce_plus_plus" and not is_own:
        yield (
            f"rollout.num_generations: 1, but {estimator} compares responses to the same prompt; "
            "set at least 2, or loss.advantage_estimator=reinforce_plus_plus"
        )
    if loss.scale_rewards == "group" and estimator.startswith("reinforce_plus_plus"):
        yield f"loss.scale_rewards: group, but {estimator} is scaled by the batch; set none"
    if is_own and loss.scale_rewards is not None:
        yield f"loss.scale_rewards: {estimator} returns final advantages; leave it out"
    if "." in loss.loss_type:
        for name in _changed(config, CLIPS):
            yield f"{name}: is not passed to {loss.loss_type}; leave it out"
        return
    if loss.loss_type != "cispo":
        if delta is not None and delta <= 1 + high:
            yield f"loss.delta: {delta} must be above 1 + loss.epsilon_high = {1 + high:g} (3, say)"
        return
    if loss.importance_sampling_level == "sequence":
        yield "loss.importance_sampling_level: cispo weights single tokens; set token"
    if delta is not None:
        yield "loss.delta: cispo caps every weight at loss.epsilon_high; leave it out"
    if high < 1:
        yield f"loss.epsilon_high: {high} must be at least 1 with cispo (5, say)"


def _teacher_problems(config) -> Iterator[str]:
    loss, path = config.loss, config.model.teacher_path
    is_alone = loss.loss_type == "distillation"
    if path is None and (is_alone or loss.distillation_coef):
        yield "model.teacher_path: is required for distillation"
    if path is not None and not (is_alone or loss.distillation_coef):
        keys = "loss.loss_type=distillation, or a weight in loss.distillation_coef"
        yield f"model.teacher_path: nothing is learnt from {path}; set {keys}"
    for name in _changed(config, OF_REWARDS) if is_alone else ():
        yield f"{name}: loss.loss_type=distillation trains without rewards; leave it out"


def _changed(config, names: tuple[str, ...]) -> list[str]:
    changed = []
    for name in names:
        section, _, leaf = name.partition(".")
        values = getattr(config, section)
        if getattr(values, leaf) != getattr(type(values), leaf):
            changed.append(name)
    return changed


def _reward_problems(config) -> Iterator[str]:
    functions, weights = config.reward.functions, config.reward.weights
    is_needed = config.loss.loss_type != "distillation"
    if not functions and config.environment.factory is None and is_needed:
        yield "reward.functions: set at least one reward function"
    for path in functions:
        if functions.count(path) > 1:
            yield f"reward.functions: '{path}' is listed twice; raise its weight instead"
    for path in dict.fromkeys(config.eval.functions):
        name = last_part(path)
        if path in functions:
            why = f"is a reward function; its held-out mean is eval/rewards/{name}/mean"
            yield f"eval.functions: '{path}' {why}"
        if config.eval.functions.count(path) > 1:
            yield f"eval.functions: '{path}' is listed twice"
        if "[^/]" not in row_of(f"eval/{name}")["pattern"]:
            yield f"eval.functions: '{path}' has the name of another metric, eval/{name}"
    num_possible = {len(functions), len(functions) + (config.environment.factory is not None)}
    if weights is not None and len(weights) not in num_possible:
        yield f"reward.weights: {len(weights)} weights for {len(functions)} reward.functions"


def _data_problems(config) -> Iterator[str]:
    data = config.data
    if bool(data.path) == bool(data.tasks):
        yield "data.path, data.tasks: set exactly one of the two"
    for name in ("name", "eval_path", "eval_split") if data.tasks else ():
        if getattr(data, name) is not None:
            yield f"data.{name}: held-out problems are made from data.tasks; leave it out"


def _environment_problems(config) -> Iterator[str]:
    rollout, environment = config.rollout, config.environment
    if not environment.is_used:
        return
    limit, longest = rollout.max_completion_length, environment.max_observation_length
    if longest != "auto" and longest >= limit:
        yield (
            f"environment.max_observation_length: {longest} must be below "
            f"rollout.max_completion_length = {limit}, so that a turn fits after it"
        )
    if (rows := rollout.tp_tail_max_rows) not in ("auto", 0):
        yield f"rollout.tp_tail_max_rows: {rows}, but episodes cannot move to other ranks; set 0"
    if config.run.trace:
        yield "run.trace: traces have no turns of environments; set false"


def _streaming_problems(config) -> Iterator[str]:
    """Yield problems of optim.stream_gradients.

    A sample's share of the gradient must be known, up to a common factor, before all samples are.
    """
    loss, needs = config.loss, "optim.stream_gradients: true needs"
    if not config.optim.stream_gradients:
        return
    if (estimator := loss.advantage_estimator).startswith("reinforce_plus_plus"):
        yield f"{needs} advantages within the group; {estimator} uses the batch"
    if "." in estimator:
        yield f"{needs} advantages within the group; {estimator} gets the whole batch"
    if loss.scale_rewards == "batch":
        yield f"{needs} advantages within the group; loss.scale_rewards=batch uses the batch"
    for name in ("num_iterations", "num_minibatches"):
        if (value := getattr(loss, name)) > 1:
            yield f"{needs} one update per step; loss.{name}={value} makes several; set 1"
