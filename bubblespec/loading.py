"""Load model, tokenizer and prompts from the user's files, and refuse what does not fit."""

import contextlib
import functools
import glob
import itertools
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import getproxies

import jinja2
import numpy as np
import torch
from huggingface_hub import constants
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, cached_file, chat_template_utils

from bubblespec.config import Config
from bubblespec.data.prompts import (
    WEIGHTS,
    build_prompt_set,
    fingerprint,
    fingerprints,
    has_date,
    leave_out,
    make_tokenize,
    reasoning_gym_rows,
)
from bubblespec.data.rows import IS_POINTER, POINTER, is_pointer, load_rows
from bubblespec.data.schedule import PromptSet
from bubblespec.errors import InputError, log, one_line
from bubblespec.learn.lora import add_adapter
from bubblespec.types import HEADS, Prompt

HUB_TIMEOUT_S = 5.0
CLEANS_UP_ANYWAY = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
EPOCH = datetime(1970, 1, 1)
# What templates are given with each chat.
SET_ANYWAY = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
TASKS_SEED, HELD_OUT_SEED = 1, 501  # of problems made from data.tasks
PREDICTS = re.compile(r"(^|\.)mtp(_layers)?\.")  # in names of heads that predict further tokens
# Tensors that a policy may leave out beside those that its class in transformers names: heads that
# predict further tokens, parts for other input than text, and constants that are computed instead.
EXTRAS = re.compile(
    rf"{PREDICTS.pattern}|(^|\.)(visual|(vision|audio)_\w+|multi_modal_projector)\."
    r"|\.inv_freq$|(attn|attention)\.(masked_)?bias$"
)

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def local_time_s() -> int:
    """Return the time of this machine's zone, in seconds since the beginning of 1970 there."""
    return (datetime.now() - EPOCH) // timedelta(seconds=1)


def load_tokenizer(config: Config, now_s: int | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the configured chat template or its own. Raises InputError.

    now_s: time (`local_time_s`) that a dated template gets for good, by default that of now."""
    tokenizer = from_pretrained(AutoTokenizer, config, config.model.path)
    if path := config.model.chat_template_path:
        try:
            with open(path, encoding="utf-8") as file:
                tokenizer.chat_template = file.read()
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot read {path}: {one_line(error)}"
            raise InputError(f"model.chat_template_path: {problem}") from error
    if isinstance(template := tokenizer.chat_template, str):
        if template.startswith(POINTER):
            key = "model.chat_template_path" if path else "model.path"
            raise InputError(f"{key}: the chat template {IS_POINTER}")
        # Some editors begin a file with this character.
        tokenizer.chat_template = template = template.removeprefix("\ufeff")
    if options := config.data.chat_template_kwargs:
        check_template_options(template, options)
        render = functools.partial(tokenizer.apply_chat_template, **options)
        tokenizer.apply_chat_template = render  # for prompts and turns alike
    keep_date(tokenizer, local_time_s() if now_s is None else now_s)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_bpe = backend is not None and type(backend.model).__name__ == "BPE"
    if is_bpe and not getattr(tokenizer, CLEANS_UP_ANYWAY, False):
        # transformers ignores it for such tokenizers, and every process would warn of that.
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def keep_date(tokenizer: PreTrainedTokenizerBase, now_s: int) -> None:
    """Let a chat template with the date have that of now_s (`local_time_s`) for good."""
    if has_date(tokenizer.chat_template):
        now = EPOCH + timedelta(seconds=now_s)
        tokenizer.apply_chat_template = functools.partial(_at, now, tokenizer.apply_chat_template)


def _at(now: datetime, render: Callable, *messages, **options):
    """Render messages by transformers, whose clock, the module's `datetime`, has stopped."""
    clock = chat_template_utils.datetime
    chat_template_utils.datetime = SimpleNamespace(now=lambda: now)
    try:
        return render(*messages, **options)
    finally:
        chat_template_utils.datetime = clock


def check_template_options(template: str | dict | None, options: dict) -> None:
    """Raise InputError for an option that no template reads, and for a truth value that is text."""
    texts = template.values() if isinstance(template, dict) else [template or ""]
    names: set[str] = set()
    for text in texts:
        with contextlib.suppress(jinja2.TemplateSyntaxError):  # rendering shows it
            found = [word for word in jinja2.Environment().lex(text) if word[1] != "whitespace"]
            names |= {
                word
                for (_, _, before), (_, kind, word) in itertools.pairwise(found)
                if kind == "name" and before != "."
            }
    for name, value in options.items():
        key = f"data.chat_template_kwargs.{name}"
        if name not in names - SET_ANYWAY:
            raise InputError(f"{key}: the chat template of model.path does not read it")
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise InputError(
                f"{key}: '{value}' is text, which is always true; leave out its quotes"
            )


def with_dtype(config: Config, device_type: str) -> Config:
    if config.model.dtype != "auto":
        return config
    dtype = "bfloat16" if device_type == "cuda" else "float32"
    return replace(config, model=replace(config.model, dtype=dtype))


def load_model(config: Config, checkpoint: str | None, device: torch.device) -> PreTrainedModel:
    """Load the policy of a checkpoint, or the initial one. With LoRA, checkpoints are adapters.

    Raises InputError if a shape differs from the model's configuration, if weights are missing
    (they would be random numbers), or if there are others (another model would be trained)."""
    has_adapter = config.model.lora_r > 0
    path = config.model.path if has_adapter or checkpoint is None else checkpoint
    key = key_of(config, path)
    if os.path.isfile(os.path.join(path, "adapter_config.json")):
        advice = "merge it into its base model (peft's merge_and_unload) and save that"
        raise InputError(f"{key}: {path} is a LoRA adapter; {advice}")
    if getattr(from_pretrained(AutoConfig, config, path), "is_encoder_decoder", False):
        raise InputError(f"{key}: {path} is an encoder-decoder model, not a decoder-only one")
    # Each tensor goes from the file to the device at once: the ranks of a machine never hold their
    # models in its memory together.
    options = {"dtype": getattr(torch, config.model.dtype), "device_map": {"": device}}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = from_pretrained(AutoModelForCausalLM, config, path, **options)
    refuse_other_shapes(key, path, info)
    heads = _further_layers(model)
    extra = [name for name in info["unexpected_keys"] if not EXTRAS.search(name)]
    extra = [name for name in extra if not name.startswith(heads)]
    unknown = ", which the model of its config.json does not have"
    for verb, names, why in (("lack", info["missing_keys"], ""), ("have", extra, unknown)):
        if names:
            first, *others = sorted(names)
            more = f" and {len(others)} more" if others else ""
            raise InputError(f"{key}: the weights of {path} {verb} {first}{more}{why}")
    if has_adapter:
        add_adapter(model, config.model, config.run.seed, checkpoint)
    return model.to(device).eval()


def refuse_other_shapes(key: str, path: str, info: dict) -> None:
    """Raise InputError if a tensor has another shape than the model. info: of the loading."""
    if info["mismatched_keys"]:
        name, there, wanted = sorted(info["mismatched_keys"])[0]
        shapes = f"is {list(there)}, but its config.json expects {list(wanted)}"
        raise InputError(f"{key}: {name} in the weights of {path} {shapes}")


def _further_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """Return how names of layers that predict further tokens begin: they follow the model's own."""
    config = model.config.get_text_config(decoder=True)
    first, count = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", None) or 0
    return tuple(f"model.layers.{first + n}." for n in range(count))


def keep_heads(config: Config, model: PreTrainedModel, checkpoint: str | None) -> None:
    """Keep what predicts further tokens, which a model's class leaves out, for checkpoints."""
    has_own = checkpoint is not None and not config.model.lora_r
    path, names = checkpoint if has_own else config.model.path, _further_layers(model)
    assert path is not None
    if not os.path.isdir(path):
        path = os.path.dirname(cached_file(path, CONFIG_NAME, local_files_only=True) or "")
    kept = {}
    for file in sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors"))):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no dict
                if PREDICTS.search(name) or name.startswith(names):
                    kept[name] = tensors.get_tensor(name)
    vars(model)[HEADS] = kept


def load_teacher(
    config: Config, tokenizer: PreTrainedTokenizerBase, num_tokens: int, device: torch.device
) -> PreTrainedModel | None:
    """Load the frozen model of distillation, if any. Raises InputError.

    Its tokenizer must have the policy's tokens under the same ids, and its model an embedding for
    each of the policy's num_tokens. Further embeddings are padding, as in the policy."""
    path, key = config.model.teacher_path, "model.teacher_path"
    if path is None:
        return None
    own, other = tokenizer.get_vocab(), from_pretrained(AutoTokenizer, config, path).get_vocab()
    if differing := dict(own.items() ^ other.items()):
        token = min(differing)
        ids = f"{own.get(token, 'no token')} and {other.get(token, 'no token')}"
        raise InputError(
            f"{key}: the tokenizer of {path} is not that of model.path: {len(differing)} tokens "
            f"differ, {token!r} for example ({ids}); distillation compares token by token"
        )
    of_teacher = replace(config, model=replace(config.model, path=path, lora_r=0))
    teacher = load_model(of_teacher, None, device)
    if (size := teacher.get_input_embeddings().num_embeddings) < num_tokens:
        raise InputError(f"{key}: {path} has {size} embeddings for {num_tokens} tokens")
    return teacher.requires_grad_(False)


def weights_state(*models: PreTrainedModel | None) -> dict[str, np.ndarray]:
    """Return fingerprints of every bit of frozen models' weights, without adapters, int64."""
    found = []
    for model in filter(None, models):
        sums = {}
        for name, weight in model.state_dict().items():
            if "lora_" not in name:
                bits = weight.flatten().view(BITS[weight.element_size()]).split(1 << 22)
                sums[name] = [part.sum(dtype=torch.int64).item() for part in bits]
        found.append(fingerprint(sums))
    return {WEIGHTS: np.array(found, np.int64)}


def from_pretrained(auto_class, config: Config, path: str, **options):
    """Load by transformers' `auto_class` from a folder, the cache or the hub. Raises InputError."""
    options["local_files_only"] = os.path.isdir(path) or not is_hub_reachable()
    try:
        return auto_class.from_pretrained(
            path, trust_remote_code=config.model.trust_remote_code, **options
        )
    except Exception as error:  # someone else's files, and a dozen libraries that read them
        if "trust_remote_code" in str(error):
            advice = "has code of its own: read it, then set model.trust_remote_code=true"
            raise InputError(f"{key_of(config, path)}: {path} {advice}") from error
        reason = f"cannot load {auto_class.__name__} from {path}: {one_line(error)}"
        files = sorted(filter(os.path.isfile, glob.glob(os.path.join(glob.escape(path), "*"))))
        if pointer := next(filter(is_pointer, files), None):
            reason = f"{pointer} {IS_POINTER}"
        if not os.path.isdir(path):
            reason = f"there is no folder {path}"
            if path.count("/") < 2 and path[:1] not in "./~":  # else it is no name of a model
                reason += ", and no such model is in the cache or on the Hugging Face hub"
                reason += "" if is_hub_reachable() else f" ({constants.ENDPOINT} cannot be reached)"
        raise InputError(f"{key_of(config, path)}: {reason}") from error


def key_of(config: Config, path: str) -> str:
    keys = dict.fromkeys(config.eval.functions, "eval.functions")
    keys |= dict.fromkeys(config.reward.functions, "reward.functions")
    keys |= {config.model.path: "model.path", config.model.teacher_path: "model.teacher_path"}
    return keys.get(path, "run.resume_from_checkpoint")


@functools.cache
def is_hub_reachable() -> bool:
    """Whether one attempt to connect succeeds; the hub's library would try for half a minute."""
    if getproxies():  # behind a proxy only a request shows whether the hub answers
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (443 if address.scheme == "https" else 80)
    with contextlib.suppress(OSError):
        socket.create_connection((address.hostname, port), HUB_TIMEOUT_S).close()
        return True
    return False


def check_vocabulary(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, list[str]]:
    """Return the size of the policy's vocabulary, and lines to print if the model has other ids.

    The vocabulary ends with the last token of the tokenizer or among the stop tokens, which must
    have an embedding; further embeddings are padding, never sampled. Raises InputError."""
    size = model.get_input_embeddings().num_embeddings
    known = set(tokenizer.get_vocab().values())
    if (largest := max(known, default=0)) >= size:
        excess = f"has token {largest}, but the model has only {size} embeddings"
        raise InputError(f"model.path: the tokenizer of {config.model.path} {excess}")
    known.update(stop_tokens(config, model, tokenizer))
    num_tokens = max(known) + 1
    lines = []
    if excess := size - num_tokens:
        problem = "token ids exceed the tokenizer's last token; they are never sampled"
        lines.append(f"{excess} of the model's {size} {problem}")
    if lacking := num_tokens - len(known):
        problem = "below its last one; these ids can be sampled and trained on like others"
        lines.append(f"warning: the tokenizer has no token for {lacking} ids {problem}")
    return num_tokens, lines


def stop_tokens(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return the configured stop tokens, or model's and tokenizer's end-of-sequence tokens.

    Raises InputError if there are none, or if the model has no such token."""
    key, size = "rollout.stop_token_ids", model.get_input_embeddings().num_embeddings
    stops, place = config.rollout.stop_token_ids, ""
    if stops is None:
        of_model = model.generation_config.eos_token_id
        of_model = of_model if isinstance(of_model, list) else [of_model]
        stops = [token for token in (tokenizer.eos_token_id, *of_model) if token is not None]
        place = ", an eos_token_id of model.path,"
        if not stops:
            reason = "neither model nor tokenizer has an end-of-sequence token; give one"
            raise InputError(f"{key}: {reason}")
    for token in stops:
        if type(token) is not int or token < 0:
            raise InputError(f"{key}: {token!r}{place} is no token id; set ids")
        if token >= size:
            raise InputError(f"{key}: {token}{place} is beyond the model's {size} tokens")
    return tuple(stops if place == "" else sorted(set(stops)))


def load_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    tokenize: Callable[[str | list[dict]], Sequence[int]] | None = None,
    *,
    saved_held_out: np.ndarray | None = None,
    warn: Callable[[str], None] = log,
) -> tuple[PromptSet, list[Prompt]]:
    """Return training prompts and held-out prompts. Raises InputError.

    A training prompt that is also held out is left out of training, whether or not this run
    evaluates: batches do not depend on that. tokenize: from a prompt to the ids that its group
    shares, by default all of its ids; saved_held_out: fingerprints of the held-out rows of a run
    that resumes, which stay the same if rows have been appended."""
    data, count, longest = config.data, config.eval.num_prompts, config.rollout.max_prompt_length
    tokenize = tokenize or make_tokenize(tokenizer)

    def build(rows: list[dict], key: str) -> PromptSet:
        form = {"system_prompt": data.system_prompt, "as_chat": data.as_chat}
        return build_prompt_set(rows, tokenize, longest, key=key, **form)

    def load(path: str, name: str | None, split: str, key: str) -> PromptSet:
        return build(load_rows(path, name, split, key=key, columns=data.columns, warn=warn), key)

    held_out, key, columns = [], "eval.num_prompts", set()
    if data.tasks:
        tasks = [vars(task) for task in data.tasks]
        train = build(reasoning_gym_rows(tasks, data.size, TASKS_SEED), "data.tasks")
        if count:
            rows = reasoning_gym_rows(tasks, count, HELD_OUT_SEED)
            held_out = build(rows, "data.tasks").prompts
    else:
        train = load(data.path, data.name, data.split, "data.path")
        if count and (data.eval_path or data.eval_split):
            key = "data.eval_path" if data.eval_path else "data.eval_split"
            name = None if data.eval_path and os.path.exists(data.eval_path) else data.name
            path, split = data.eval_path or data.path, data.eval_split or data.split
            held_out = load(path, name, split, key).prompts[:count]
        elif count:
            if len(train) < 2:
                dropped = f"({train.num_dropped} more exceed rollout.max_prompt_length)"
                reason = "usable prompts are too few to hold any out"
                raise InputError(f"data.path: {len(train)} {reason} {dropped}")
            held_out = _hold_out(train, min(count, len(train) // 2), saved_held_out)
        if train.prompts and held_out:
            columns = train.prompts[0].columns.keys() & held_out[0].columns.keys()
    if count and not held_out:
        problem = f"no held-out prompt has at most {longest} tokens"
        raise InputError(f"rollout.max_prompt_length: {problem}")
    if len(held_out) < count:
        has = "half of data.path" if key == "eval.num_prompts" else f"all of {key}"
        has = "the short enough ones of data.tasks" if data.tasks else has
        warn(f"warning: eval.num_prompts: {count}, but only {len(held_out)} are held out, {has}")
    remaining = leave_out(train, held_out, columns)
    if train.prompts and not remaining.prompts:
        raise InputError(f"{key}: every training prompt is held out, so none is left to train on")
    return remaining, held_out


def _hold_out(train: PromptSet, count: int, saved: np.ndarray | None) -> list[Prompt]:
    """Return the training prompts to hold out: the saved ones, if all are there."""
    if saved is not None:
        of = dict(zip(fingerprints(train.prompts).tolist(), train.prompts, strict=True))
        held_out = [of[name] for name in saved.tolist() if name in of]
        if len(held_out) == len(saved):
            return held_out
    return train.batch(0, 0, count)
