"""Which values of configuration keys go together: what bounds of single keys (config.py) cannot
express."""

from bubblespec.config_checks import require
from bubblespec.errors import InputError

METHODS = ("bubble", "suffix", "drafter")  # sources of drafts that speculative.method may name


def check_combinations(config):
    """The same configuration, a `config.Config`. Raises InputError, naming the key and the nearest
    valid value."""
    _check_sizes(config)
    _check_loss(config)
    _check_rewards_and_data(config)
    if config.optim.stream_gradients:
        _check_streaming(config.loss)
    names, rollout = config.speculative.method.split("+"), config.rollout
    require(
        names == ["none"] or (set(names) <= set(METHODS) and len(set(names)) == len(names)),
        "speculative.method",
        config.speculative.method,
        f"none, or some of {', '.join(METHODS)}, joined by +",
    )
    if not config.model.lora_target_modules:
        raise InputError("model.lora_target_modules: [] must be [all-linear], or names of layers")
    if rollout.temperature == 0:
        raise InputError(
            "rollout.temperature: 0 gives equal responses, so no policy gradient; training needs "
            "it above 0"
        )
    if config.run.eval_steps and not config.eval.num_prompts:
        raise InputError(
            "eval.num_prompts: 0, but run.eval_steps asks for evaluations; give at least 1"
        )
    return config


def _check_sizes(config) -> None:
    rollout, tokens = config.rollout, config.optim.max_tokens_per_microbatch
    longest = rollout.max_prompt_length + rollout.max_completion_length
    longer = max(("max_completion_length", "max_prompt_length"), key=vars(rollout).get)
    limit = f"{1 << 20}, prompt and response together"
    require(longest <= 1 << 20, f"rollout.{longer}", getattr(rollout, longer), f"below {limit}")
    for key, largest, name in (
        ("rollout.min_completion_length", rollout.max_completion_length, "max_completion_length"),
        ("reward.overlong_buffer_length", rollout.max_completion_length, "max_completion_length"),
    ):
        section, leaf = key.split(".")
        value = getattr(getattr(config, section), leaf)
        require(value <= largest, key, value, f"at most rollout.{name} = {largest}")
    require(
        rollout.num_slots == "auto" or rollout.max_batch_tokens >= rollout.num_slots,
        "rollout.max_batch_tokens",
        rollout.max_batch_tokens,
        f"at least rollout.num_slots = {rollout.num_slots}, so that every row can decode in one "
        "forward",
    )
    require(
        tokens >= longest,
        "optim.max_tokens_per_microbatch",
        tokens,
        f"at least {longest} = rollout.max_prompt_length + rollout.max_completion_length, so that "
        "every response fits",
    )


def _check_loss(config) -> None:
    """Combinations of estimator, loss and minibatches."""
    loss, rollout = config.loss, config.rollout
    estimator = loss.advantage_estimator
    if rollout.num_generations == 1:
        if rollout.dynamic_sampling:
            raise InputError(
                "rollout.dynamic_sampling: needs rollout.num_generations of at least 2, as one "
                "response never differs"
            )
        if estimator != "reinforce_plus_plus":
            raise InputError(
                f"rollout.num_generations: 1, but {estimator} compares a prompt's responses with "
                "each other, so every advantage would be 0; give at least 2, or "
                "loss.advantage_estimator=reinforce_plus_plus"
            )
    require(
        rollout.num_prompts_per_step % loss.num_minibatches == 0,
        "loss.num_minibatches",
        loss.num_minibatches,
        f"a divisor of rollout.num_prompts_per_step = {rollout.num_prompts_per_step}, so that all "
        "updates are of one size",
    )
    if loss.scale_rewards == "group" and estimator.startswith("reinforce_plus_plus"):
        raise InputError(
            f"loss.scale_rewards: group, but {estimator} is scaled by the batch; leave it out or "
            "give none"
        )
    delta, high = loss.delta, loss.epsilon_high
    if loss.loss_type != "cispo":
        lowest = f"above 1 + loss.epsilon_high = {1 + high:g} (3, say)"
        require(delta is None or delta > 1 + high, "loss.delta", delta, lowest)
        return
    if loss.importance_sampling_level == "sequence":
        raise InputError(
            "loss.importance_sampling_level: sequence, but cispo weights single tokens; give token"
        )
    if delta is not None:
        raise InputError(
            "loss.delta: has no meaning with cispo, which caps every weight at "
            "loss.epsilon_high; leave it out"
        )
    what = "at least 1 with cispo: the largest weight (5, say)"
    require(high >= 1, "loss.epsilon_high", high, what)


def _check_rewards_and_data(config) -> None:
    data, reward, num_prompts = config.data, config.reward, config.rollout.num_prompts_per_step
    if bool(data.path) == bool(data.tasks):
        raise InputError("data.path, data.tasks: give exactly one of them")
    if data.tasks:
        for name in ("name", "eval_path", "eval_split"):
            if getattr(data, name) is not None:
                raise InputError(
                    f"data.{name}: has no meaning with data.tasks, whose held-out problems come "
                    "from another seed; leave it out"
                )
        smallest = f"at least rollout.num_prompts_per_step = {num_prompts}"
        require(data.size >= num_prompts, "data.size", data.size, smallest)
    if not reward.functions:
        raise InputError("reward.functions: give at least one reward function")
    for path in reward.functions:
        if reward.functions.count(path) > 1:
            raise InputError(
                f"reward.functions: '{path}' is given more than once; give it once with a larger "
                "weight"
            )
    if reward.weights is not None and len(reward.weights) != len(reward.functions):
        raise InputError(
            f"reward.weights: {len(reward.weights)} weights for {len(reward.functions)} "
            "reward.functions; give one each"
        )


def _check_streaming(loss) -> None:
    """A sample's part of the gradient must be known, up to a common factor, before all samples
    are."""
    needs = "optim.stream_gradients: true needs advantages that a group has by itself, and"
    if loss.advantage_estimator.startswith("reinforce_plus_plus"):
        raise InputError(
            f"{needs} loss.advantage_estimator={loss.advantage_estimator} takes the batch's"
        )
    if loss.scale_rewards == "batch":
        raise InputError(f"{needs} loss.scale_rewards=batch divides them by the batch's")
    for name in ("num_iterations", "num_minibatches"):
        if (value := getattr(loss, name)) > 1:
            raise InputError(
                f"optim.stream_gradients: true needs one update per step, and loss.{name}={value} "
                "makes several; give 1"
            )
