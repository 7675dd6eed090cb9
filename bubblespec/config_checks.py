"""What the values of a configuration must be, beyond their types. A mistake is an `InputError` of one line that names the key."""

import math
from typing import TYPE_CHECKING, Any

from bubblespec.errors import InputError

if TYPE_CHECKING:
    from bubblespec.config import Config

# What no run can want: beyond it sizes exhaust the machine before anything is checked, and numbers overflow.
LARGEST = {
    "data.size": 1 << 24,
    "eval.num_prompts": 1 << 24,
    "rollout.num_prompts_per_step": 1 << 20,
    "rollout.num_slots": 1 << 20,
    "rollout.dynamic_sampling_max_batches": 1 << 16,
    "reward.overlong_penalty_factor": 1e6,
    "rollout.max_batch_tokens": 1 << 24,
    "rollout.temperature": 1e4,
    "eval.temperature": 1e4,
    "loss.num_iterations": 1 << 12,
    "loss.epsilon_low": 1e6,
    "loss.epsilon_high": 1e6,
    "loss.kl_coef": 1e6,
    "optim.learning_rate": 1e3,
    "optim.weight_decay": 1e6,
    "optim.adam_epsilon": 1e6,
    "optim.max_grad_norm": 1e12,
    "optim.max_tokens_per_microbatch": 1 << 32,
    "bubble.max_slowdown": 1e9,
    "bubble.progress_timeout_s": 1e8,
    "run.timeout_s": 1e8,
}
MIN_TEMPERATURE = 1e-3


def check_values(config: "Config", flat: dict[str, Any]) -> None:
    """Ranges and combinations that types cannot express. Raises InputError naming the key and the nearest valid value.

    flat: the same values as {"section.key": value}."""
    positive = (
        "rollout.num_prompts_per_step rollout.num_generations rollout.max_prompt_length rollout.max_completion_length "
        "rollout.dynamic_sampling_max_batches eval.num_generations optim.max_logits_per_chunk "
        "loss.num_iterations loss.num_minibatches run.max_steps run.keep_last run.logging_steps data.size "
        "model.lora_alpha"
    )
    for key in positive.split():
        _require(flat[key] >= 1, key, flat[key], "at least 1")
    for key, value in flat.items():
        _require(not isinstance(value, float) or math.isfinite(value), key, value, "finite")
    not_negative = (
        "model.lora_r rollout.min_completion_length rollout.temperature rollout.top_k eval.num_prompts loss.epsilon_low "
        "loss.epsilon_high loss.kl_coef optim.learning_rate optim.warmup_steps optim.weight_decay optim.max_grad_norm "
        "optim.adam_epsilon optim.max_skipped_steps run.seed run.eval_steps run.save_steps data.seed eval.temperature "
        "reward.overlong_buffer_length reward.overlong_penalty_factor reward.num_workers"
    )
    for key in not_negative.split():
        _require(flat[key] is None or flat[key] >= 0, key, flat[key], "at least 0")
    lookahead = config.bubble.lookahead
    _require(
        lookahead == "auto" or (isinstance(lookahead, int) and lookahead >= 0),
        "bubble.lookahead",
        lookahead,
        "auto, or at least 0",
    )
    window = config.speculative.fixed_window
    _require(window is None or window >= 0, "speculative.fixed_window", window, "null, or at least 0")
    for key in ("bubble.max_draft_tokens", "bubble.max_slowdown", "speculative.max_history_tokens"):
        _require(flat[key] >= 0, key, flat[key], "at least 0")
    _require(config.bubble.progress_timeout_s > 0, "bubble.progress_timeout_s", config.bubble.progress_timeout_s, "above 0")
    _require(0 < config.rollout.top_p <= 1, "rollout.top_p", config.rollout.top_p, "above 0 and at most 1")
    for key in ("run.timeout_s", "reward.timeout_s"):
        _require(flat[key] > 0, key, flat[key], "above 0")
    _require(config.run.seed < 1 << 63, "run.seed", config.run.seed, f"below {1 << 63}")
    for key in ("optim.adam_beta1", "optim.adam_beta2"):
        _require(0 <= flat[key] < 1, key, flat[key], "at least 0 and below 1")
    for key in ("rollout.stop_token_ids", "run.timeline_steps"):
        for number, value in enumerate(flat[key] or []):
            _require(value >= 0, f"{key}[{number}]", value, "at least 0")
    slots = config.rollout.num_slots
    _require(slots == "auto" or (isinstance(slots, int) and slots >= 1), "rollout.num_slots", slots, "auto, or at least 1")
    for key, value in flat.items():
        _require(not isinstance(value, int) or abs(value) < 1 << 63, key, value, f"below {1 << 63}")
    for key, limit in LARGEST.items():
        _require(flat[key] in (None, "auto") or flat[key] <= limit, key, flat[key], f"at most {limit}")
    for key in ("rollout.temperature", "eval.temperature"):  # logits divided by less leave the range of float32
        _require(not flat[key] or flat[key] >= MIN_TEMPERATURE, key, flat[key], f"0, or at least {MIN_TEMPERATURE}")
    for key, limit in {"rollout.num_generations": 1 << 12, "eval.num_generations": 1 << 12, "run.max_steps": 1 << 31}.items():
        _require(flat[key] <= limit, key, flat[key], f"at most {limit} (the noise counter's field)")
    _require(bool(config.model.lora_target_modules), "model.lora_target_modules", "[]", "[all-linear], or names of layers")
    rollout, optim = config.rollout, config.optim
    longest = rollout.max_prompt_length + rollout.max_completion_length
    longer = max(("rollout.max_completion_length", "rollout.max_prompt_length"), key=flat.get)
    _require(longest <= 1 << 20, longer, flat[longer], f"below {1 << 20}, prompt and response together")
    _require(
        rollout.min_completion_length <= rollout.max_completion_length,
        "rollout.min_completion_length",
        rollout.min_completion_length,
        f"at most rollout.max_completion_length = {rollout.max_completion_length}",
    )
    _require(rollout.max_batch_tokens >= 1, "rollout.max_batch_tokens", rollout.max_batch_tokens, "at least 1")
    _require(
        slots == "auto" or rollout.max_batch_tokens >= slots,
        "rollout.max_batch_tokens",
        rollout.max_batch_tokens,
        f"at least rollout.num_slots = {slots}, so that every row can decode in one forward",
    )
    _require(
        optim.max_tokens_per_microbatch >= longest,
        "optim.max_tokens_per_microbatch",
        optim.max_tokens_per_microbatch,
        f"at least {longest} = rollout.max_prompt_length + rollout.max_completion_length, so that every response fits",
    )
    if rollout.dynamic_sampling and rollout.num_generations == 1:
        raise InputError("rollout.dynamic_sampling: needs rollout.num_generations of at least 2, as one response never differs")
    _check_loss(config)
    if rollout.temperature == 0:
        raise InputError("rollout.temperature: 0 gives equal responses, so no policy gradient; training needs it above 0")
    for key in ("model.path", "run.output_dir", "run.resume_from_checkpoint", "data.split"):
        if not flat[key].strip():
            raise InputError(f"{key}: is empty")
    if bool(config.data.path) == bool(config.data.tasks):
        raise InputError("data.path, data.tasks: give exactly one of them")
    for key in ("data.name", "data.eval_path", "data.eval_split"):
        if config.data.tasks and flat[key] is not None:
            raise InputError(
                f"{key}: has no meaning with data.tasks, whose held-out problems come from another seed; leave it out"
            )
    _require(
        not config.data.tasks or config.data.size >= rollout.num_prompts_per_step,
        "data.size",
        config.data.size,
        f"at least rollout.num_prompts_per_step = {rollout.num_prompts_per_step}",
    )
    for number, task in enumerate(config.data.tasks):
        _require(0 < task.weight < math.inf, f"data.tasks[{number}].weight", task.weight, "above 0 and finite")
    weights = config.reward.weights
    if not config.reward.functions:
        raise InputError("reward.functions: give at least one reward function")
    for path in config.reward.functions:
        if config.reward.functions.count(path) > 1:
            raise InputError(f"reward.functions: '{path}' is given more than once; give it once with a larger weight")
    for number, weight in enumerate(weights or []):
        _require(math.isfinite(weight), f"reward.weights[{number}]", weight, "finite")
    if weights is not None and len(weights) != len(config.reward.functions):
        raise InputError(
            f"reward.weights: {len(weights)} weights for {len(config.reward.functions)} reward.functions; give one each"
        )
    if config.run.eval_steps and not config.eval.num_prompts:
        raise InputError("eval.num_prompts: 0, but run.eval_steps asks for evaluations; give at least 1")


def _check_loss(config: "Config") -> None:
    """Combinations of estimator, loss and minibatches, and the overlong buffer."""
    loss, rollout = config.loss, config.rollout
    buffer = config.reward.overlong_buffer_length
    _require(
        buffer <= rollout.max_completion_length,
        "reward.overlong_buffer_length",
        buffer,
        f"at most rollout.max_completion_length = {rollout.max_completion_length}",
    )
    _require(
        rollout.num_prompts_per_step % loss.num_minibatches == 0,
        "loss.num_minibatches",
        loss.num_minibatches,
        f"a divisor of rollout.num_prompts_per_step = {rollout.num_prompts_per_step}, so that all updates are of one size",
    )
    if loss.scale_rewards == "group" and loss.advantage_estimator.startswith("reinforce_plus_plus"):
        raise InputError(
            f"loss.scale_rewards: group, but {loss.advantage_estimator} is scaled by the batch; leave it out or give none"
        )
    if loss.loss_type == "cispo":
        if loss.importance_sampling_level == "sequence":
            raise InputError("loss.importance_sampling_level: sequence, but cispo weights single tokens; give token")
        if loss.delta is not None:
            raise InputError("loss.delta: has no meaning with cispo, which caps every weight at loss.epsilon_high; leave it out")
        _require(
            loss.epsilon_high >= 1, "loss.epsilon_high", loss.epsilon_high, "at least 1 with cispo: the largest weight (5, say)"
        )
    elif loss.delta is not None:
        least = 1 + loss.epsilon_high
        _require(loss.delta > least, "loss.delta", loss.delta, f"above 1 + loss.epsilon_high = {least:g} (3, say)")


def _require(holds: bool, key: str, value: Any, what: str) -> None:
    if not holds:
        raise InputError(f"{key}: {value} must be {what}")
