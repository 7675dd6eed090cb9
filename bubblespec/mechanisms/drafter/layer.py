"""Drafters: one decoder layer that predicts the policy's next tokens from its hidden states.

At each position a drafter reads the policy's hidden states there and the embedding of the token
after it. Where no hidden state is known yet it continues from its own (EAGLE, arXiv 2401.15077; TLT
trains such a layer in idle time, arXiv 2511.16665). `HeadDrafter` is a layer of the policy's own
class, as heads that come with models are (heads.py); eagle3.py has a Llama layer for any policy.

Shape legend: N positions, H hidden size, V token ids that the drafter knows.
"""

import copy
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from bubblespec.engine import attention
from bubblespec.engine.arrays import to_device
from bubblespec.engine.model import body_of, named_layers, of_layers, output_head
from bubblespec.types import HEADS

PLACEHOLDER_VOCABULARY = 8  # of the layer's own embedding, which is not used


class Drafter(torch.nn.Module):
    """What predicts the policy's next tokens from its hidden states; two shapes are below.

    The policy's embedding and output head are used as they are at each call."""

    policy: PreTrainedModel
    taps: tuple[int, ...] = ()
    """Layers of the policy whose inputs it reads."""

    def __init__(self, policy: PreTrainedModel, ids: np.ndarray):
        """ids: int [V], the tokens that can be drafted, ascending."""
        super().__init__()
        self.__dict__["policy"] = policy  # not registered: its parameters are not ours
        self.hidden_size = policy.get_output_embeddings().weight.shape[1]
        self._head: list[Any] = []  # weight and bias of `ids`
        self.draft_among(ids)

    def draft_among(self, ids: np.ndarray) -> None:
        """Draft these tokens alone, int [V] ascending."""
        self.ids = np.asarray(ids, np.int64)
        self.device_ids = to_device(self.ids, self.policy.device)
        self._head_version = -1

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a chain begins with, [..., H], of what the policy's forwards return.

        hidden: [..., (1 + taps) * H], see `Taps.behind`."""
        raise NotImplementedError

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, packing, kernel: str = "sdpa"
    ) -> torch.Tensor:
        """Return states [N, H], which the next position of a chain begins with.

        hidden: [N, H], of `combine` or of the position before; tokens: int64 [N], the ones after
        these positions."""
        raise NotImplementedError

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of `ids` at states [N, H]."""
        raise NotImplementedError

    def discard(self) -> None:
        """Take it out of what checkpoints keep, as it is no use any more."""

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the policy's embeddings [N, H] of tokens int64 [N]."""
        with torch.no_grad():
            return self.policy.get_input_embeddings()(tokens)

    def policy_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the policy's logits [N, V] of hidden states [N, H or more] for `ids` alone."""
        head = output_head(self.policy)
        linear: Any = head.linear
        if self._head_version != linear.weight._version:
            # Not an inference tensor, even if first needed while drafting: training uses it too.
            with torch.inference_mode(False), torch.no_grad():
                is_whole = self.ids[-1] == len(self.ids) - 1  # a view, without a copy
                rows = slice(len(self.ids)) if is_whole else self.device_ids
                tensors = linear.weight.detach(), linear.bias
                self._head = [None if t is None else t[rows] for t in tensors]
            self._head_version = linear.weight._version
        return head.finish(functional.linear(hidden[..., : self.hidden_size], *self._head))


class HeadDrafter(Drafter):
    """A layer of the policy's own class, the projection that fuses its two inputs, and their norms.

    This is the shape of heads that come with models for multi-token prediction. It estimates the
    policy's next hidden states, which go through the policy's own output head."""

    came_as: dict[str, torch.Tensor] | None = None
    """The tensors with which it came, by name, see heads.py."""

    def __init__(self, policy: PreTrainedModel, ids: np.ndarray, seed: int = 0):
        """ids: see `Drafter`. Raises ValueError if the policy's class cannot have one layer."""
        super().__init__(policy, ids)
        ends: list[Any] = [policy.get_input_embeddings(), policy.get_output_embeddings()]
        sizes = [module.weight.shape[1] for module in ends]
        options: dict[str, Any] = {"device": policy.device, "dtype": policy.dtype}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body: Any = _one_layer(policy).to(**options)
            self.fuse = torch.nn.Linear(sum(sizes), sizes[1], bias=False, **options)
        if not hasattr(self.body, "norm"):
            raise ValueError(f"{type(policy).__name__} has no norm behind its layers")
        self.norms = torch.nn.ModuleList(copy.deepcopy(self.body.norm) for _ in ends)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[..., : self.hidden_size]

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, packing, kernel: str = "sdpa"
    ) -> torch.Tensor:
        token_norm, hidden_norm = self.norms
        fused = self.fuse(torch.cat((token_norm(self.embedded(tokens)), hidden_norm(hidden)), -1))
        out = self.body(
            inputs_embeds=fused[None],
            position_ids=packing.position[None],
            use_cache=False,
            packing=packing,
            kernel=kernel,
        )
        return out.last_hidden_state[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.policy_logits(states)

    def discard(self) -> None:
        if self.came_as is not None:
            vars(self.policy)[HEADS] = self.came_as


def _one_layer(policy: PreTrainedModel) -> PreTrainedModel:
    """Create a decoder of the policy's class whose layer is the policy's last with full attention.

    What lies outside the layers, as the last norm, is copied too."""
    number = last_full_layer(policy.config)
    try:
        config = _one_layer_config(policy.config, number)
        body = body_of(type(policy)._from_config(config, dtype=policy.dtype))
        body.set_attn_implementation(attention.NAME)
    except Exception as error:  # the model's own code runs here
        reason = " ".join(str(error).split())[:200]
        message = f"{type(policy).__name__} cannot be made with one layer: {reason}"
        raise ValueError(message) from error
    source, target = ([name for name, _ in named_layers(model)] for model in (policy, body))
    known, state = body_of(policy).state_dict(), {}
    for name, tensor in body.state_dict().items():
        name_there = name
        if target and name.startswith(f"{target[0]}."):
            name_there = source[number] + name.removeprefix(target[0])
        adapted = name_there.replace(".weight", ".base_layer.weight")  # with a LoRA adapter
        found = known.get(name_there, known.get(adapted))
        if found is not None and found.shape == tensor.shape:
            state[name] = found.detach().clone()
    body.load_state_dict(state, strict=False)
    return body.eval()


def last_full_layer(config: PreTrainedConfig) -> int:
    """Return the last layer with full attention, else the last, among those with keys of its own.

    Gemma 4's last layers may read those of earlier ones."""
    kinds = of_layers(config, "layer_types")
    del kinds[len(kinds) - max(of_layers(config, "num_kv_shared_layers", 0)) :]
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    return full[-1] if full else len(kinds) - 1


def _one_layer_config(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    count = decoder.num_hidden_layers
    vars(decoder).update(vars(decoder.per_layer_config[number]))  # the layer's own head size
    decoder.per_layer_config = None
    decoder.num_kv_shared_layers = decoder.hidden_size_per_layer_input = 0
    for key, value in list(vars(decoder).items()):
        if isinstance(value, list | tuple) and len(value) == count:  # one for each layer
            setattr(decoder, key, type(value)([value[number]]))
    decoder.num_hidden_layers = 1
    if hasattr(decoder, "first_k_dense_replace"):  # layers without experts
        decoder.first_k_dense_replace = int(number < decoder.first_k_dense_replace)
    decoder.vocab_size = PLACEHOLDER_VOCABULARY
    decoder.attn_temperature_tuning = False  # by the place in a packed input
    # Full attention: training (`UnrolledPacking`) knows no window.
    if getattr(decoder, "layer_types", None) is None:
        decoder.sliding_window = None
    elif decoder.layer_types[0] in ("sliding_attention", "chunked_attention"):
        decoder.layer_types = ["full_attention"]
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(decoder, key, None)
    config.tie_word_embeddings = False
    return config
