"""Configuration: typed dataclasses, which file.py fills from a YAML file and overrides.

A key is declared once: its type and default, its meaning in the docstring below, and in `key(...)`
its bounds and whether a resumed run may have another value (`resume`; by default it may not). Leaf
names are TRL's where TRL has one, else verl's. A mistake is an `InputError` naming its key."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from bubblespec.config.keys import (
    EXACT,
    MISSING,
    ROUNDING,
    SAFE,
    UINT64,
    Bound,
    above,
    at_least,
    at_most,
    is_model,
    key,
    keys_of,
)
from bubblespec.config.mechanisms import (
    DrafterConfig,
    QuantizedConfig,
    SpeculativeConfig,
    TailBatchingConfig,
)

# of prompt_id, draw_index, sample and position; a prompt has at most one visit per step
COUNTER = "the noise counter's field"
# logits divided by less leave the range of float32
TEMPERATURE, OR_GREEDY = ((at_least(1e-3, other), at_most(1e4)) for other in (None, 0))
SHARE = Bound(lambda share: 0 < share <= 1, "above 0 and at most 1")
DECAY = Bound(lambda decay: 0 <= decay < 1, "at least 0 and below 1")


@dataclass
class ModelConfig:
    """The policy."""

    path: str = MISSING
    """Hugging Face folder or hub name of the policy (a causal language model)."""
    chat_template_path: str | None = None
    """Jinja file with a chat template that takes the place of the tokenizer's, for example one that
    shows tools. Checkpoints keep it."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of the weights: auto is bfloat16 on GPUs and float32 on CPUs. With bfloat16 the
    optimizer keeps float32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU when there is one."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn", "flash_attn_3"] = "auto"
    """Attention kernel of training on GPUs (generation has its own); auto takes the first of
    flash_attn_3, flash_attn, varlen and sdpa that works."""
    kernels: Literal["auto", "triton", "torch"] = key("auto", resume=ROUNDING)
    """What computes on a GPU besides products and attention in training. auto tries each kernel at
    the start and takes torch's operation in place of one that fails or differs, with a line; triton
    ends there; torch tries none, generates without CUDA graphs, and is slower."""
    cpu_linear: Literal["auto", "torch"] = key("auto", resume=ROUNDING)
    """Kernels of float32 linear layers on a CPU. auto measures for a second at the start and may
    keep a second copy of the weights; torch makes float32 tokens repeat bit for bit."""
    batch_invariant: bool = False
    """Make the tokens of a row independent of the other rows in float32 and bfloat16 too; forwards
    take longer. Refused for models that are not like Llama, and if a comparison at the start finds
    a difference (docs/exactness.md)."""
    gradient_checkpointing: bool = key(False, resume=ROUNDING)
    """Recompute activations in the backward pass: less memory, more time."""
    trust_remote_code: bool = key(False, resume=SAFE)
    """Allow model and tokenizer folders to run their own code."""
    lora_r: int = key(0, at_least(0))
    """Rank of a LoRA adapter on all linear layers but the output head; 0 trains all weights. Needs
    requirements-lora.txt, with transformers below 5.24: newer ones require peft 0.22, not on PyPI
    yet."""
    lora_alpha: int = key(32, at_least(1))
    """The adapter's output is scaled by lora_alpha / lora_r."""
    teacher_path: str | None = None
    """Folder or hub name of a model with the same tokenizer from which the policy learns, with
    loss.loss_type=distillation or loss.distillation_coef; frozen, on every GPU."""


@dataclass
class TaskConfig:
    """One task of a mixture."""

    name: str = MISSING
    """A reasoning-gym task."""
    weight: float = key(1.0, above(0))
    """Share of this task in the mixture (relative to the other weights)."""
    config: dict[str, Any] = key({})
    """The task's own parameters."""


@dataclass
class DataConfig:
    """The prompts, and the columns that rewards read."""

    path: str | None = None
    """JSON/JSONL/CSV/TSV/Parquet file, folder, glob or hub dataset with a column `prompt`."""
    name: str | None = None
    """Subset of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset, or of files whose names have splits."""
    columns: dict[str, str] = key({})
    """{prompt: question} takes the column `prompt` from `question`; a dot reaches nested ones."""
    tasks: list[TaskConfig] = key([])
    """Mixture of reasoning-gym tasks (instead of `path`)."""
    size: int = key(10_000, at_least(1), at_most(1 << 24))
    """Number of problems made from `tasks`."""
    eval_path: str | None = None
    """Held-out prompts, as in `path` (default: the split below, or rows held out of `path`)."""
    eval_split: str | None = None
    """Held-out split, as in `split`."""
    as_chat: bool = False
    """Wrap string prompts as a user message and apply the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message in front of chat prompts that have none; string prompts need as_chat."""
    chat_template_kwargs: dict[str, Any] = key({})
    """Options that the chat template reads, such as {enable_thinking: false}."""


@dataclass
class RewardConfig:
    """Reward functions, and how they are run."""

    functions: list[str] = key(["bubblespec.rewards.exact_match"])
    """Dotted paths of reward functions with TRL's signature, and reward models: hub names, or
    folders with a slash (./folder), of sequence classification models with one label. A call has
    the responses of one whole group, unless a function is marked `@bubblespec.rewards.per_sample`.
    With loss.loss_type=distillation the default is none."""
    weights: list[float] | None = None
    """One weight per function (default: all 1)."""
    model_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Precision of reward models; auto is that of model.dtype."""
    model_device: Literal["auto", "cpu"] = key("auto", resume=ROUNDING)
    """Where reward models are: auto is the rank's own device."""
    model_max_tokens_per_batch: int = key(8192, at_least(1), at_most(1 << 32), resume=ROUNDING)
    """Maximum number of tokens (prompts and responses) in one forward of a reward model. A longer
    sequence has a forward of its own, as has every sequence in float64."""
    model_in_idle_time: bool = key(True, resume=SAFE)
    """Whether ranks that wait in a rollout score responses with reward models; otherwise all are
    scored after it. No score changes."""
    num_workers: int = key(2, at_least(0), resume=SAFE)
    """Processes per rank that score finished responses while others are generated. 0 scores in the
    main process, without protection from functions that hang or crash."""
    timeout_s: float = key(60.0, above(0), resume=SAFE)
    """Seconds that a function may take in a worker per response of a call; longer is an error."""
    reward_on_error: float | None = 0.0
    """Reward where a function fails, is late or returns no finite number; null ends the run."""
    overlong_buffer_length: int = key(0, at_least(0))
    """Soft overlong punishment (DAPO): over this many tokens before max_completion_length a
    response loses reward, linearly from 0 to 1. 0 turns it off."""


@dataclass
class EnvironmentConfig:
    """Episodes: tools or an environment that answer the model's turns."""

    factory: str | None = None
    """Dotted path of an environment's class: TRL's (`reset`, and public methods as tools) or
    SkyRL-gym's (`init`, `step`)."""
    tools: list[str] = key([])
    """Dotted paths of functions with type hints and docstrings that the model may call."""
    max_turns: int = key(8, at_least(1))
    """Turns of the model in an episode; tool calls in the last are not run."""
    max_observation_length: int | str = key("auto", at_least(1, "auto"))
    """Tokens between two turns, or added to the prompt; longer text is cut. auto: 512, or half of
    rollout.max_completion_length if that is less."""
    num_workers: int = key(4, at_least(0), resume=SAFE)
    """Processes per rank that run environments, each one call at a time, and as many again for
    drafts; 0 runs them in the main process, unprotected from what hangs or crashes."""
    timeout_s: float = key(60.0, above(0), resume=SAFE)
    """Seconds that a call may take in a worker; taking longer is the tool's error."""
    draft: bool = key(True, resume=SAFE)
    """Whether drafts run copies of the environment; false where tools have side effects."""

    @property
    def is_used(self) -> bool:
        """Whether responses are episodes."""
        return self.factory is not None or bool(self.tools)


@dataclass
class RolloutConfig:
    """Sampling of a step, and the size of the engine."""

    num_prompts_per_step: int = key(16, at_least(1), at_most(1 << 20))
    """Prompts per step, over all ranks; fewer than ranks are refused."""
    num_generations: int = key(8, at_least(1), at_most(1 << 12, COUNTER))
    """Responses per prompt (the group of GRPO)."""
    max_prompt_length: int = key(512, at_least(1))
    """Maximum length of a prompt in tokens; longer prompts are dropped and counted."""
    max_completion_length: int = key(512, at_least(1))
    """Maximum length of a response in tokens."""
    min_completion_length: int = key(0, at_least(0))
    """Minimum length of a response in tokens: stop tokens cannot be sampled before it."""
    temperature: float = key(1.0, *TEMPERATURE)
    """Sampling temperature; above 0, as equal responses have no policy gradient."""
    top_p: float = key(1.0, SHARE)
    """Nucleus of the sampled distribution; 1 keeps all."""
    top_k: int = key(0, at_least(0))
    """Keep the k best tokens; 0 keeps all."""
    dynamic_sampling_max_batches: int = key(1, at_least(1), at_most(1 << 16))
    """DAPO's dynamic sampling. Above 1, groups with equal rewards, which have no gradient, are
    replaced by groups of other prompts, until a step has generated this many batches."""
    placement: Literal["in_turn", "balanced"] = key("balanced", resume=SAFE)
    """Which rank generates what: in_turn deals prompts in turn; balanced places samples so that all
    ranks are expected to finish together. Affects time, not tokens."""
    tp_tail_max_rows: int | str = key("auto", at_least(0, "auto"), at_most(1 << 10), resume=SAFE)
    """Once at most this many rows are left, all ranks decode them together, each with a shard of
    the weights. 0: never; auto: at most 16, if that is measured to be faster. Affects time, not
    tokens."""
    progress_backend: Literal["auto", "shm"] = key("auto", resume=SAFE)
    """How ranks exchange progress: auto (NCCL on GPUs; else shared memory or gloo), or shm only."""
    stop_token_ids: list[int] | None = key(None, at_least(0))
    """Ids that end a response (default: the model's and the tokenizer's); they must be its ids."""
    max_num_seqs: int | str = key("auto", at_least(1, "auto"), at_most(1 << 20), resume=SAFE)
    """Maximum number of rows that one rank decodes at once, drafts included. auto: as many as are
    useful and fit into memory; give a number where float32 tokens must repeat bit for bit."""
    gpu_memory_utilization: float = key(0.9, SHARE, resume=SAFE)
    """Share of each GPU's memory that a run may fill; the rest is for CUDA, NCCL and graphs."""
    free_cache_engine: bool = key(False, resume=SAFE)
    """Release keys and values during the gradient step: more slots, but drafts are prefilled
    again."""
    max_num_batched_tokens: int = key(2048, at_least(1), at_most(1 << 24), resume=SAFE)
    """Maximum number of tokens in one forward; prompts are prefilled in chunks under it."""
    enforce_eager: bool = key(False, resume=SAFE)
    """Use no CUDA graphs (GPUs)."""


@dataclass
class EvalConfig:
    """Held-out prompts."""

    num_prompts: int = key(0, at_least(0), at_most(1 << 24))
    """Held-out prompts per evaluation; 0 turns evaluations off."""
    num_generations: int = key(4, at_least(1), at_most(1 << 12, COUNTER), resume=SAFE)
    """Responses per held-out prompt; pass@k is reported for k = 1, 2, 4, ... up to it."""
    temperature: float | None = key(None, *OR_GREEDY, resume=SAFE)
    """Sampling temperature of evaluation (default: the rollout's); 0 is greedy."""
    top_p: float | None = key(None, SHARE, resume=SAFE)
    """Nucleus of evaluation (default: the rollout's); 1 keeps all."""
    top_k: int | None = key(None, at_least(0), resume=SAFE)
    """Number of best tokens of evaluation (default: the rollout's); 0 keeps all."""
    functions: list[str] = key([], resume=SAFE)
    """Functions and models, as in reward.functions, that score held-out responses alone. The mean
    of each is eval/NAME, with the last part of its path."""


@dataclass
class LossConfig:
    """Advantages and loss; docs/recipes.md has the settings of published recipes."""

    advantage_estimator: str = "grpo"
    """What rewards are compared with: the mean of the group (grpo), of its other samples (rloo), of
    the batch (reinforce_plus_plus), of group and then batch (reinforce_plus_plus_baseline). Or the
    dotted path of a function of samples and rewards, see docs/extending.md."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Which standard deviation divides the advantages (default: group for grpo, none for rloo,
    batch for reinforce_plus_plus)."""
    loss_type: str = "dapo"
    """How tokens are averaged: per sequence (grpo), by a constant (dr_grpo), over the update (dapo,
    cispo); cispo also clips the weight of a token's gradient instead of the gradient. distillation:
    the divergence from model.teacher_path alone, over the update; rewards are not needed. Or the
    dotted path of a function that gives the loss of each token, see docs/extending.md."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """A probability ratio per token, or per sequence, the geometric mean of its tokens' (GSPO)."""
    epsilon_low: float = key(0.2, at_least(0), at_most(1e6))
    """Lower clip of the probability ratio: 1 - epsilon_low; cispo has none."""
    epsilon_high: float = key(0.2, at_least(0), at_most(1e6))
    """Upper clip: 1 + epsilon_high; with cispo the maximum weight itself, as in TRL (for example
    5)."""
    delta: float | None = None
    """Dual clip: maximum ratio where the advantage is negative (for example 3)."""
    kl_coef: float = key(0.0, at_least(0), at_most(1e6))
    """Weight of the KL to the initial policy, of which a copy is kept (not with LoRA)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that KL whose gradient is taken; see docs/recipes.md."""
    distillation_coef: float = key(0.0, at_least(0), at_most(1e6))
    """Weight of the divergence from model.teacher_path, added to a loss of rewards."""
    distillation_beta: float = key(1.0, at_least(0), at_most(1))
    """Which divergence (the `beta` of TRL's GKD): 1 is KL(policy || teacher), 0 is KL(teacher ||
    policy), between them the generalized Jensen-Shannon divergence; see docs/recipes.md."""
    num_iterations: int = key(1, at_least(1), at_most(1 << 12))
    """Passes over a batch; 1, with one minibatch, is strictly on-policy."""
    num_minibatches: int = key(1, at_least(1))
    """Updates in a pass, each on whole groups of its own; divides rollout.num_prompts_per_step."""
    mask_truncated_completions: bool = False
    """Leave responses cut off by max_completion_length out of the loss."""


@dataclass
class OptimConfig:
    """AdamW, and the size of micro-batches."""

    learning_rate: float = key(1e-6, at_least(0), at_most(1e3))
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up; linear and cosine reach 0 at max_steps."""
    warmup_steps: int = key(0, at_least(0))
    """Steps of linear warm-up."""
    weight_decay: float = key(0.0, at_least(0), at_most(1e6))
    """Decoupled weight decay of matrices (biases and norms are not decayed)."""
    adam_betas: list[float] = key([0.9, 0.999], DECAY)
    """Decay of the first and of the second moment."""
    adam_epsilon: float = key(1e-8, above(0), at_most(1e6))
    """Term added to the denominator."""
    max_grad_norm: float = key(1.0, at_least(0), at_most(1e12))
    """Global gradient norm limit; 0 does not clip."""
    shard_state: bool = key(False, resume=SAFE)
    """Each rank keeps master weights and moments of its share of the parameters only (ZeRO stage
    1)."""
    stream_gradients: bool = key(False, resume=ROUNDING)
    """Ranks that wait compute gradients of finished samples. Needs advantages within the group and
    one update per step. Weights then repeat up to the order of summation, not bit for bit."""
    max_tokens_per_microbatch: int = key(8192, at_most(1 << 32), resume=ROUNDING)
    """Maximum number of tokens (prompts and responses) in one forward and backward."""


@dataclass
class RunConfig:
    """Length, outputs and seed of a run."""

    output_dir: str = key(MISSING, resume=SAFE)
    """Folder of checkpoints, metrics and TensorBoard files."""
    seed: int = key(0, at_least(0), UINT64)
    """Seed of batches and sampling noise."""
    max_steps: int = key(100, at_least(1), at_most(1 << 31, COUNTER), resume=SAFE)
    """Training steps."""
    eval_steps: int = key(0, at_least(0), resume=SAFE)
    """Steps between evaluations, also before the first and after the last step; 0: never."""
    save_steps: int = key(50, at_least(0), resume=SAFE)
    """Steps between checkpoints, and one after the last step; 0: only that."""
    timeline_steps: list[int] = key([], at_least(1), resume=SAFE)
    """Steps (from 1) whose timeline of all ranks is written to output_dir/timeline."""
    profile_steps: list[int] = key([], at_least(1), resume=SAFE)
    """Steps (from 1) of which torch.profiler writes a trace per rank to output_dir/profile."""
    trace: bool = key(False, resume=SAFE)
    """Record responses, drafts, and load and time of forwards in output_dir/trace (simulator)."""
    log_to: str | None = key(None, resume=SAFE)
    """wandb, trackio, or dotted path of a function of each line of metrics (docs/metrics.md)."""
    save_rollouts: bool = key(False, resume=SAFE)
    """Write all samples of each step to a Parquet file in output_dir/rollouts (docs/metrics.md)."""
    save_total_limit: int = key(2, at_least(1), resume=SAFE)
    """Checkpoints kept; older ones are deleted, except the best one of save_best."""
    save_best: str | None = key(None, resume=SAFE)
    """Metric of evaluations, eval/NAME: a checkpoint is saved whenever it is higher than after all
    earlier steps, and output_dir/checkpoint-best is a link to it."""
    resume_from_checkpoint: str = key("auto", resume=SAFE)
    """auto: the newest checkpoint in output_dir; none: start a new run; or a checkpoint folder."""
    allow_changed_data: bool = key(False, resume=SAFE)
    """Continue although data, the chat template or frozen weights differ, or the folder of the
    model has moved. Appended rows, and files of data that have moved, need no permission."""
    timeout_s: float = key(1800.0, above(0), at_most(1e8), resume=SAFE)
    """Seconds a collective may wait for the slowest rank before the job ends."""


@dataclass
class Config:
    """A whole run, section by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    quantized: QuantizedConfig = field(default_factory=QuantizedConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    tail_batching: TailBatchingConfig = field(default_factory=TailBatchingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def has_drafts(self) -> bool:
        """Whether rows may have drafts to verify."""
        return bool(self.speculative.sources) or self.tail_batching.enabled

    @property
    def keeps_drafts(self) -> bool:
        """Whether drafts are kept for coming steps: made in idle time, or of deferred rows."""
        return "bubble" in self.speculative.sources or self.tail_batching.enabled

    @property
    def trains_in_rollouts(self) -> bool:
        return self.optim.stream_gradients

    @property
    def reward_models(self) -> list[str]:
        """Entries of reward.functions and eval.functions that are models."""
        paths = dict.fromkeys([*self.reward.functions, *self.eval.functions])
        return list(filter(is_model, paths))

    @property
    def scores_in_rollouts(self) -> bool:
        """Whether waiting ranks have responses to score."""
        return self.reward.model_in_idle_time and any(map(is_model, self.reward.functions))

    def rows_together(self, num_ranks: int) -> int | str:
        """Return how many last rows ranks may decode together, auto: by cost; 0: never."""
        can = num_ranks > 1 and not self.environment.is_used  # an episode stays on its rank
        return self.rollout.tp_tail_max_rows if can else 0


def flatten(config: Config) -> dict[str, Any]:
    sections = dataclasses.asdict(config)
    return {f"{s}.{k}": value for s, keys in sections.items() for k, value in keys.items()}


def resume_classes(config: Config) -> dict[str, str]:
    """Return `{"section.key": EXACT, ROUNDING or SAFE}`.

    run.max_steps is exact if the learning rate's schedule depends on it; keys of what a run does
    not use are safe where their default has changed."""
    classes = {name: f.metadata.get("resume", EXACT) for name, f in keys_of(Config).items()}
    if config.optim.lr_scheduler_type != "constant":
        classes["run.max_steps"] = EXACT
    if not config.environment.is_used:  # it had another default before
        classes["environment.max_observation_length"] = SAFE
    return classes
