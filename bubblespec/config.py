"""Configuration: typed dataclasses, filled from a YAML file and dotted overrides, checked before anything heavy starts.

Leaf names are TRL's where TRL has one, verl's otherwise. Every mistake ends in an `InputError` of one line that names the key.
"""

import dataclasses
import difflib
import os
import re
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bubblespec.config_checks import check_values
from bubblespec.errors import InputError


@dataclass
class ModelConfig:
    """The policy."""

    path: str = MISSING
    """Hugging Face folder or hub name of the policy (a causal language model)."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of the weights; bfloat16 keeps float32 master weights in the optimizer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU when there is one."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn"] = "auto"
    """Attention kernel; auto takes the fastest that is importable on the device (sdpa on CPU)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    trust_remote_code: bool = False
    """Allow model and tokenizer folders to run their own code."""
    lora_r: int = 0
    """Rank of a LoRA adapter, trained in place of the weights (needs requirements-lora.txt); 0 trains all weights."""
    lora_alpha: int = 32
    """The adapter's output is scaled by lora_alpha / lora_r."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the layers that get an adapter; [all-linear] is all linear layers but the output head."""


@dataclass
class TaskConfig:
    """One task of a mixture."""

    name: str = MISSING
    """A reasoning-gym task."""
    weight: float = 1.0
    """Share of this task in the mixture (relative to the other weights)."""
    config: dict[str, Any] = field(default_factory=dict)
    """The task's own parameters."""


@dataclass
class DataConfig:
    """The prompts, and what the rewards know about them."""

    path: str | None = None
    """A JSON/JSONL/CSV/Parquet file, a folder or glob of them, or a hub dataset; needs a `prompt` column (see columns)."""
    name: str | None = None
    """Subset of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns by other names: {prompt: question} takes `prompt` from `question`; a dot reaches into a nested column."""
    tasks: list[TaskConfig] = field(default_factory=list)
    """Mixture of reasoning-gym tasks (instead of `path`)."""
    size: int = 10_000
    """Number of problems made from `tasks`."""
    seed: int = 1
    """Seed of the problems made from `tasks`; held-out problems come from another one."""
    eval_path: str | None = None
    """Held-out file, folder, glob or hub dataset (default: the split below, or rows held out of `path`)."""
    eval_split: str | None = None
    """Held-out split of a hub dataset."""
    as_chat: bool = False
    """Wrap string prompts as a user message and apply the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message in front of chat prompts that have none."""


@dataclass
class RewardConfig:
    """What a response is worth, and how that is found out."""

    functions: list[str] = field(default_factory=lambda: ["bubblespec.rewards.exact_match"])
    """Dotted paths of reward functions with TRL's signature."""
    weights: list[float] | None = None
    """One weight per function (default: all 1)."""
    num_workers: int = 2
    """Processes on each rank that score finished responses, one at a time, while others are generated; 0 scores them in the main
    process, all of a rank's in one call, without protection from functions that hang or crash."""
    timeout_s: float = 60.0
    """Seconds that a function may take for one response in a worker; what takes longer is an error."""
    adaptive_timeout: bool = False
    """Lower the time-out to 1.5 times the slowest answer so far with a reward above 0, within 2 and 30 seconds (RollPacker)."""
    reward_on_error: float | None = 0.0
    """Reward of a response for which a function raises, times out, crashes or returns no finite number; null ends the run."""
    overlong_buffer_length: int = 0
    """Soft overlong punishment (DAPO): a response loses reward in these last tokens before max_completion_length; 0 is off."""
    overlong_penalty_factor: float = 1.0
    """What a response of max_completion_length loses; in the buffer the loss grows linearly up to it."""


@dataclass
class RolloutConfig:
    """What is sampled in a step, and by an engine of which size."""

    num_prompts_per_step: int = 16
    """Prompts in a step's batch, over all ranks."""
    num_generations: int = 8
    """Responses per prompt (the group of GRPO)."""
    max_prompt_length: int = 512
    """Longest prompt in tokens; longer ones are dropped with a count."""
    max_completion_length: int = 512
    """Longest response in tokens."""
    min_completion_length: int = 0
    """Stop tokens are barred before this many response tokens."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus of the sampled distribution; 1 keeps all."""
    top_k: int = 0
    """Keep the k best tokens; 0 keeps all."""
    dynamic_sampling: bool = False
    """Replace groups whose responses all got the same reward, which teach nothing, by groups of further prompts (DAPO)."""
    dynamic_sampling_max_batches: int = 4
    """Most batches generated in a step, the first among them; groups that they cannot replace stay in."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a response (default: those of the model's generation config and tokenizer)."""
    num_slots: int | str = "auto"
    """Rows that one rank decodes at the same time, run-ahead drafts among them; more rows wait in a queue. auto takes what fits
    into free memory, up to what is of use; give a number where float32 or bfloat16 tokens must repeat bit for bit."""
    free_cache_engine: bool = False
    """Give the keys and values back during the gradient step: room for more slots, but unfinished drafts are prefilled again."""
    max_batch_tokens: int = 2048
    """Most tokens in one forward; prompts are prefilled in chunks under it."""
    enforce_eager: bool = False
    """Launch every kernel by itself, instead of replaying CUDA graphs of forwards of up to 1024 tokens (GPUs; one more slot)."""


@dataclass
class EvalConfig:
    """Held-out prompts."""

    num_prompts: int = 0
    """Held-out prompts per evaluation; 0 evaluates nothing."""
    num_generations: int = 4
    """Responses per held-out prompt; pass@k is reported for k = 1, 2, 4, ... up to it."""
    temperature: float | None = None
    """Sampling temperature of evaluation (default: the rollout's)."""


@dataclass
class LossConfig:
    """Advantages and loss; docs/recipes.md has the settings of published recipes."""

    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "grpo"
    """What rewards are compared with: the mean of the group (grpo), of the group's other samples (rloo), of the batch
    (reinforce_plus_plus), of the group and then the batch (reinforce_plus_plus_baseline)."""
    scale_rewards: Literal["group", "batch", "none"] | None = None
    """Which standard deviation divides the advantages (default: group for grpo, none for rloo, batch for reinforce_plus_plus)."""
    loss_type: Literal["grpo", "dr_grpo", "dapo", "cispo"] = "dapo"
    """How tokens are averaged: per sequence (grpo), by a constant (dr_grpo), over all tokens of the update (dapo, cispo);
    cispo also clips the weight of a token's gradient instead of the gradient."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """A probability ratio for each token, or one for each sequence, the geometric mean of its tokens' (GSPO)."""
    epsilon_low: float = 0.2
    """Lower clip of the probability ratio: 1 - epsilon_low; cispo has none."""
    epsilon_high: float = 0.2
    """Upper clip of the probability ratio: 1 + epsilon_high; with cispo the largest weight itself, as in TRL (5, say)."""
    delta: float | None = None
    """Dual clip: where the advantage is negative, the ratio counts as at most this (verl's clip_ratio_c; 3, say)."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial policy; above 0 a reference copy is kept (with LoRA none: the adapter is turned off)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that KL whose gradient is taken; docs/recipes.md says what each of them pulls towards."""
    num_iterations: int = 1
    """Passes over a batch; 1, with one minibatch, is strictly on-policy."""
    num_minibatches: int = 1
    """Updates in a pass, each on whole groups of its own; divides rollout.num_prompts_per_step."""
    mask_truncated_completions: bool = False
    """Leave responses cut off by max_completion_length out of the loss."""


@dataclass
class OptimConfig:
    """AdamW, and the size of micro-batches."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine end at 0 at max_steps."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices (biases and norms are not decayed)."""
    adam_beta1: float = 0.9
    """First moment's decay."""
    adam_beta2: float = 0.999
    """Second moment's decay."""
    adam_epsilon: float = 1e-8
    """Term that keeps the division finite."""
    max_grad_norm: float = 1.0
    """Global gradient norm limit; 0 does not clip."""
    max_skipped_steps: int = 5
    """Steps in a row whose update may be left out for a non-finite loss or gradient; one more ends the run."""
    shard_state: bool = False
    """Keep master weights and moments of a share of the parameters on each rank, instead of all on every rank."""
    max_tokens_per_microbatch: int = 8192
    """Most tokens (prompts and responses) in one forward and backward."""
    max_logits_per_chunk: int = 1 << 26
    """Most logits (tokens x vocabulary) of a micro-batch that exist at once."""


@dataclass
class SpeculativeConfig:
    """Drafts and how they are accepted. Changes the time of a run, and no token (but see `rule`)."""

    method: Literal["none", "bubble", "suffix", "bubble+suffix"] = "bubble+suffix"
    """Where drafts come from: idle time (bubble), matches in earlier text (suffix), both, or none (the plain trainer)."""
    rule: Literal["coupled", "point_mass"] = "coupled"
    """When a draft token is accepted; coupled shares its noise with the draft, point_mass does not (for ablation)."""
    fixed_window: int | None = None
    """Propose this many draft tokens always, instead of planning windows by their cost (for ablation)."""
    max_history_tokens: int = 4_000_000
    """Tokens of earlier epochs' responses kept for suffix matching; the oldest are dropped first."""


@dataclass
class BubbleConfig:
    """Drafting ahead in idle time. Changes the time of a run, and no token."""

    lookahead: int | str = "auto"
    """Steps to draft ahead; 0 drafts nothing; auto goes as deep as max_draft_tokens and the measured drift make worth while."""
    max_draft_tokens: int = 2_000_000
    """Tokens of run-ahead drafts kept (4 bytes each)."""
    uses_soft_bubbles: bool = True
    """Let drafts join the forwards of a rank that still decodes, not only fill the time after it has finished."""
    max_slowdown: float = 1.0
    """How much slower drafts may make the forwards of a rank that still decodes."""
    order: Literal["global", "own"] = "global"
    """Which items a rank drafts first: the next of all, or its own."""
    progress_backend: Literal["gloo", "nccl"] = "gloo"
    """Collectives of the progress ticks; a gloo side group leaves the GPU alone, nccl runs on a stream of its own."""
    progress_timeout_s: float = 600.0
    """Seconds without a tick after which the job ends, naming the rank that did not answer."""


@dataclass
class RunConfig:
    """Length, outputs and seed of a run."""

    output_dir: str = MISSING
    """Folder of checkpoints, metrics and TensorBoard files."""
    seed: int = 0
    """Seed of batches and sampling noise."""
    max_steps: int = 100
    """Training steps."""
    eval_steps: int = 0
    """Evaluate every so many steps, and before the first and after the last; 0 never."""
    save_steps: int = 0
    """Save a checkpoint every so many steps and after the last; 0 only after the last."""
    logging_steps: int = 10
    """Write sample completions to TensorBoard every so many steps; metrics are written every step."""
    timeline_steps: list[int] = field(default_factory=list)
    """Steps (from 0) of which a timeline of all ranks is written: a trace and a picture in output_dir/timeline."""
    keep_last: int = 2
    """Checkpoints kept; older ones are deleted."""
    resume_from_checkpoint: str = "auto"
    """auto continues from the newest checkpoint in output_dir, none starts anew, else a checkpoint folder."""
    timeout_s: float = 1800.0
    """Seconds a collective may wait for the slowest rank before the job ends."""


@dataclass
class TraceConfig:
    enabled: bool = False
    """Record responses, drafts and every forward with its load and time into output_dir/trace, for replay."""


@dataclass
class Config:
    """A whole run, section by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    bubble: BubbleConfig = field(default_factory=BubbleConfig)
    run: RunConfig = field(default_factory=RunConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)


def load_config(path: str, overrides: list[str] = ()) -> Config:
    """YAML file, then `section.key=value` overrides, into a checked `Config`. Raises InputError."""
    if not os.path.isfile(path):
        raise InputError(f"--config: no file at {path}")
    try:
        base = OmegaConf.load(path)
    except Exception as error:  # PyYAML and OmegaConf raise many kinds; all mean a file that is not valid YAML
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    return _resolve(base, overrides, path)


def config_of_sections(sections: dict[str, dict], overrides: list[str], source: str) -> Config:
    """The same from a dictionary of sections in place of a file; source: what an error calls it."""
    return _resolve(OmegaConf.create(_escape(sections)), overrides, source)


def _resolve(base: Any, overrides: list[str], path: str) -> Config:
    layers = [base]
    for override in overrides:
        if not override.partition("=")[0].strip(". ") or "=" not in override:
            raise InputError(f"override '{override}' is not of the form section.key=value")
        try:
            layers.append(OmegaConf.from_dotlist([override]))
        except Exception as error:
            raise InputError(f"override '{override}': not valid YAML: {' '.join(str(error).split())}") from error
    merged = OmegaConf.structured(Config)
    for layer in layers:
        plain = OmegaConf.to_container(layer)
        if not isinstance(plain, dict):
            raise InputError(f"{path}: expected sections (model, data, ...), found {type(plain).__name__}")
        _check_keys(plain, Config)
        merged = _merge(merged, layer)
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
        config = OmegaConf.to_object(merged) if not missing else None
    except OmegaConfBaseException as error:  # a reference ${...} to what does not exist
        raise InputError(f"{error.full_key}: {_first_line(error)}") from error
    if missing:
        raise InputError(f"{missing[0]}: has no default, so it must be given")
    check_values(config, flatten(config))
    return config


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML, which `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(dataclasses.asdict(config))))


def flatten(config: Config) -> dict[str, Any]:
    """`{"section.key": value}` of a resolved configuration."""
    return {f"{s}.{k}": v for s, fields in dataclasses.asdict(config).items() for k, v in fields.items()}


def _merge(base: Any, layer: Any, prefix: str = "") -> Any:
    """OmegaConf's merge, which checks the types; `prefix` is the key of `base` itself."""
    try:
        return OmegaConf.merge(base, layer)
    except OmegaConfBaseException as error:
        raise InputError(f"{prefix}{error.full_key}: {_first_line(error)}") from error


def _check_keys(given: dict, schema: type, prefix: str = "") -> None:
    """Unknown keys, with the nearest valid one, and lists and sections that are something else.

    OmegaConf would report the former without the section and the latter in terms of its own classes.
    """
    types = typing.get_type_hints(schema)
    for name, value in given.items():
        key = f"{prefix}{name}"
        if name not in types:
            raise InputError(f"{key}: unknown key{_nearest(str(name), list(types), prefix)}")
        if dataclasses.is_dataclass(types[name]):
            if not isinstance(value, dict):
                raise InputError(f"{key}: is a section, not a value")
            _check_keys(value, types[name], f"{key}.")
        if typing.get_origin(types[name]) is dict and isinstance(value, list):
            raise InputError(f"{key}: is a mapping; give it as a whole, as in {key}={{name: value}}")
        element = _list_element(types[name])
        if element is None or value is None or str(value).startswith("${"):  # OmegaConf checks None and references
            continue
        if not isinstance(value, list):
            raise InputError(f"{key}: is a list; give it as a whole, as in {key}=[...]")
        for number, item in enumerate(value if dataclasses.is_dataclass(element) else []):
            if not isinstance(item, dict):
                raise InputError(f"{key}[{number}]: is a section, not a value")
            _check_keys(item, element, f"{key}[{number}].")
            _merge(OmegaConf.structured(element), item, f"{key}[{number}].")


def _list_element(hint: Any) -> type | None:
    """The X of `list[X]` and `list[X] | None`."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is list:
            return typing.get_args(part)[0]
    return None


def _nearest(name: str, siblings: list[str], prefix: str) -> str:
    """The right name in the wrong section, else the key of the same section that is spelled most alike."""
    sections = {s.name: s.type for s in dataclasses.fields(Config)}
    elsewhere = [f"{s}.{name}" for s, schema in sections.items() if name in {f.name for f in dataclasses.fields(schema)}]
    alike = [f"{prefix}{m}" for m in difflib.get_close_matches(name, siblings, n=1)]
    matches = elsewhere or alike
    return f"; did you mean {' or '.join(matches)}?" if matches else f"; valid are {', '.join(sorted(siblings))}"


def _escape(value: Any) -> Any:
    """`${` is written so that it is read as text, not as a reference; a backslash in front of it counts as an escape."""
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_escape(v) for v in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
