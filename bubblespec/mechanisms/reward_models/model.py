"""A reward model: a sequence classification model with one label, its tokenizer and its forwards.

As in TRL, prompt and response go through the model's own tokenizer, chats through its chat
template, without further special tokens, and the logit of the one label is the reward. Sequences
are packed without padding where the model allows it, else padded on the right, else fed one by one;
a trial against the model's own forward decides. A sequence of more tokens than the model's
positions loses its first ones. In float64 each sequence has a forward of its own, so that its score
does not depend on the others by a single bit.

Shape legend: S sequences, N packed tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from bubblespec import loading
from bubblespec.config import Config
from bubblespec.engine.arrays import to_device
from bubblespec.engine.comparison import random_tokens
from bubblespec.engine.model import forward_hidden, of_layers, pack_sequences
from bubblespec.engine.model_checks import check_rotary, longest_window, use_packed_attention
from bubblespec.errors import InputError, gpu_problem

MAX_LENGTH = 1 << 20  # tokens of a sequence, where neither model nor tokenizer has a limit
TRIED = (12, 5, 3)  # tokens of sequences in a trial, beside one beyond the model's windows
# of logits in a trial, as a share of the largest: other sums in another order
ROUNDING = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.1}


def load(config: Config, path: str, device: torch.device, now_s: int) -> "RewardModel":
    """Load the model and tokenizer of a folder or hub name. Raises InputError.

    now_s: see `loading.load_tokenizer`."""
    key, dtype = loading.key_of(config, path), config.reward.model_dtype
    tokenizer = loading.from_pretrained(AutoTokenizer, config, path)
    loading.keep_date(tokenizer, now_s)
    options = {"dtype": getattr(torch, config.model.dtype if dtype == "auto" else dtype)}
    options |= {"device_map": {"": device}, "num_labels": 1}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    auto_class = AutoModelForSequenceClassification
    model, info = loading.from_pretrained(auto_class, config, path, **options)
    for _, there, wanted in info["mismatched_keys"]:
        if wanted[0] == 1 and there[1:] == wanted[1:]:
            raise InputError(f"{key}: {path} has {there[0]} labels; a reward model has one")
    loading.refuse_other_shapes(key, path, info)
    if info["missing_keys"]:
        missing = min(info["missing_keys"])
        kind = f"no {type(model).__name__} of one label"
        raise InputError(f"{key}: the weights of {path} lack {missing}; it is {kind}")
    model.eval().requires_grad_(False)
    if model.dtype == torch.float64:
        # transformers' default, a grouped product, has no float64.
        model.set_experts_implementation("eager")
    try:
        return RewardModel(model, tokenizer, config.reward.model_max_tokens_per_batch, path)
    except ValueError as error:
        raise InputError(f"{key}: {path}: {error}") from error


class RewardModel:
    """A loaded reward model."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_tokens: int, path: str
    ):
        """max_tokens: of a forward of several sequences."""
        self.model, self.tokenizer = model, tokenizer
        self.max_tokens, self.path = max_tokens, path
        positions = min(of_layers(model.config, "max_position_embeddings", math.inf))
        self.max_length = int(min(positions, tokenizer.model_max_length, MAX_LENGTH))
        self.num_truncated = 0
        """Sequences that were longer than the model's positions."""
        self.batching, self._compute = self._choose()

    def tokens_of(self, prompt: str | list[dict], completion: str) -> np.ndarray:
        """Return the tokens to score, int64, at most `max_length`: the first ones are left out.

        A response that continues the prompt's last message is joined to it. Raises what the chat
        template raises."""
        if isinstance(prompt, str):
            text = prompt + completion
        else:
            *messages, last = prompt
            if last["role"] == "assistant":
                last = last | {"content": (last.get("content") or "") + completion}
                messages.append(last)
            else:
                messages += [last, {"role": "assistant", "content": completion}]
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise ValueError("prompt and response have no tokens")
        if len(ids) > self.max_length:
            self.num_truncated += 1
            ids = ids[-self.max_length :]
        return np.array(ids, np.int64)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[np.ndarray]) -> list[float]:
        """Return the logit of each sequence of tokens, int64, in as few forwards as allowed."""
        found = np.zeros(len(sequences))
        for chosen in self.batches([len(ids) for ids in sequences]):
            tokens = [to_device(sequences[index], self.model.device) for index in chosen]
            found[chosen] = self._compute(tokens).double().cpu().numpy()
        return found.tolist()

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of the sequences of each forward, longest first."""
        is_alone = self.batching == "alone" or self.model.dtype == torch.float64
        chosen, size = list[int](), 0
        for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
            # After padding all are as long as the first.
            padded = lengths[chosen[0]] if chosen and self.batching == "padded" else 0
            added = max(lengths[index], padded)
            if chosen and (is_alone or size + added > self.max_tokens):
                yield chosen
                chosen, size, added = [], 0, lengths[index]
            chosen.append(index)
            size += added
        if chosen:
            yield chosen

    def end_of(self, ids: torch.Tensor) -> int:
        """Return the position whose logit counts, as transformers' classes find it.

        It is that of the last token that is not the model's padding token, or the last one."""
        pad = self.model.config.get_text_config().pad_token_id
        if pad is None:
            return len(ids) - 1
        real = (ids != pad).nonzero()
        return int(real[-1]) if len(real) else 0

    # Three ways to compute the logits of sequences of tokens [n], float [S].

    def packed(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        lengths = [len(ids) for ids in sequences]
        packing = pack_sequences(lengths, self.model.device)
        hidden = forward_hidden(self.model, torch.cat(list(sequences)), packing)
        first = np.cumsum(lengths) - lengths
        ends = first + np.array([self.end_of(ids) for ids in sequences])
        score: Any = self.model.score
        return score(hidden[to_device(ends, hidden.device)])[:, 0]

    def padded(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        pad = self.model.config.get_text_config().pad_token_id or 0
        ids = pad_sequence(list(sequences), batch_first=True, padding_value=pad)
        mask = pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
        return self.model(input_ids=ids, attention_mask=mask).logits[:, 0]

    def alone(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self.model(input_ids=ids[None]).logits[:, 0] for ids in sequences])

    @torch.inference_mode()
    def _choose(self) -> tuple[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]]:
        """Return the first way whose logits are those of one by one, with its name."""
        model, implementation = self.model, self.model.config._attn_implementation
        length = longest_window(model, self.max_length)
        sizes = [min(size, length) for size in (length, *TRIED)]
        sequences = list(random_tokens(model, sum(sizes)).split(sizes))
        wanted = self.alone(sequences)
        if not wanted.isfinite().all():
            raise ValueError("its logits are not finite: the weights are damaged, or overflow")
        for name, prepare in (("packed", use_packed_attention), ("padded", lambda *_: None)):
            try:
                check_rotary(model, self.max_length)
                prepare(model, self.max_length)
                compute = getattr(self, name)
                differs = (compute(sequences) - wanted).abs().max() / wanted.abs().max()
                if differs <= ROUNDING[model.dtype]:
                    return name, compute
            except Exception as error:  # the model's own code runs here
                if gpu_problem(error) is not None:
                    raise
            model.set_attn_implementation(implementation)
        return "alone", self.alone
