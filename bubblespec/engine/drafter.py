"""The drafter: one decoder layer of the policy's own class, which says what the policy is likely to
say next.

At each position it sees the policy's last hidden state there and the embedding of the token after
it, and returns its estimate of
the policy's next hidden state, from which the policy's own output head gives the token after that
one. In place of a hidden state
that is not known yet it goes on from its own estimate (EAGLE, arXiv 2401.15077; TLT trains such a
layer in idle time, arXiv
2511.16665). Embedding and head are the policy's, as they are now; the head is restricted to some
token ids.

Shape legend: N positions, H hidden size, E embedding size, V token ids of the restricted head.
"""

import copy

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bubblespec.engine import attention
from bubblespec.engine.model import output_head
from bubblespec.engine.packing import to_device

PLACEHOLDER_VOCABULARY = 8  # of the layer's own embedding, which is not used


class Drafter(torch.nn.Module):
    """Its parameters are the layer's, its norms' and those that fuse its two inputs."""

    def __init__(self, policy: PreTrainedModel, ids: np.ndarray, seed: int = 0):
        """ids: int [V], the tokens that it can draft, ascending. The layer begins as the policy's
        last one. Raises ValueError where the policy's class cannot have a single layer."""
        super().__init__()
        self._policy = [policy]  # in a list: none of its parameters is ours
        weight, embedding = output_head(policy).weight, policy.get_input_embeddings().weight
        options = {"device": policy.device, "dtype": policy.dtype}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = _one_layer(policy).to(**options)
            self.fuse = torch.nn.Linear(
                embedding.shape[1] + weight.shape[1], weight.shape[1], bias=False, **options
            )
        self.norms = torch.nn.ModuleList(
            torch.nn.RMSNorm(size, **options) for size in (embedding.shape[1], weight.shape[1])
        )
        self.restrict_to(ids)

    def restrict_to(self, ids: np.ndarray) -> None:
        """Draft these tokens from now on, int [V], ascending."""
        self.ids = np.asarray(ids, np.int64)
        self.device_ids = to_device(
            self.ids, self._policy[0].device
        )  # `ids` on the device, int64 [V]
        self.place = {token: number for number, token in enumerate(self.ids.tolist())}
        """Where in `ids` a token is."""
        self._head, self._head_version = None, -1

    @property
    def policy(self) -> PreTrainedModel:
        """Whose embedding and head it uses."""
        return self._policy[0]

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, packing, kernel: str = "sdpa"
    ) -> torch.Tensor:
        """Estimates of the policy's hidden states, [N, H]. hidden: [N, H], at these positions;
        tokens: int64 [N], after them; packing: of the positions, as a policy's forward has it."""
        with torch.no_grad():
            embedded = self._policy[0].get_input_embeddings()(tokens)
        of_token, of_hidden = self.norms
        fused = self.fuse(torch.cat((of_token(embedded), of_hidden(hidden)), dim=-1))
        out = self.body(
            inputs_embeds=fused[None],
            position_ids=packing.position[None],
            use_cache=False,
            packing=packing,
            kernel=kernel,
        )
        return out.last_hidden_state[0]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """What the policy's head makes of hidden states [N, H], for `ids` alone: [N, V]."""
        head = output_head(self._policy[0])
        if self._head is None or self._head_version != head.weight._version:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # what is first made for a chain is used in training too
                self._head = [
                    None if t is None else t[self.device_ids] for t in (head.weight, head.bias)
                ]
            self._head_version = head.weight._version
        return linear(states, *self._head)


def _one_layer(policy: PreTrainedModel) -> PreTrainedModel:
    """A decoder of the policy's class with one layer, which is a copy of the policy's last one with
    full attention, and its last norm."""
    number = _last_full_layer(policy.config.get_text_config(decoder=True))
    try:
        body = (
            type(policy)
            ._from_config(_one_layer_config(policy.config, number), dtype=policy.dtype)
            .base_model
        )
        body.set_attn_implementation(attention.NAME)
    except Exception as error:  # the model's own code runs here
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{type(policy).__name__} cannot be made with one layer: {reason}"
        ) from error
    layers = [
        [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for model in (policy.base_model, body)
    ]
    for source, target in [(layers[0][number], layers[1][0])] if all(layers) else []:
        own, wanted = source.state_dict(), target.state_dict()
        # With an adapter the names are others.
        found = {
            name: own.get(name, own.get(name.replace(".weight", ".base_layer.weight")))
            for name in wanted
        }
        if all(t is not None and t.shape == wanted[name].shape for name, t in found.items()):
            target.load_state_dict({name: t.detach().clone() for name, t in found.items()})
    # Beside its layers a decoder has norms, and embeddings of other things than tokens.
    own, wanted = policy.base_model.state_dict(), body.state_dict()
    token_embedding = id(body.get_input_embeddings().weight)
    names = [
        n for n, p in body.named_parameters() if id(p) != token_embedding and own.get(n) is not None
    ]
    beside = {
        n: own[n].detach().clone()
        for n in names
        if not _is_of_layers(n, body) and own[n].shape == wanted[n].shape
    }
    body.load_state_dict(beside, strict=False)
    body.eval()
    return body


def _is_of_layers(name: str, body: PreTrainedModel) -> bool:
    prefixes = [n for n, m in body.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    return any(name.startswith(f"{prefix}.") for prefix in prefixes)


def _last_full_layer(config: PreTrainedConfig) -> int:
    kinds = list(
        getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    )
    full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    return full[-1] if full else len(kinds) - 1


def _one_layer_config(config: PreTrainedConfig, number: int) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    count = decoder.num_hidden_layers
    for key, value in list(vars(decoder).items()):
        if isinstance(value, list | tuple) and len(value) == count:  # one for each layer
            setattr(decoder, key, type(value)([value[number]]))
    decoder.num_hidden_layers, decoder.vocab_size = 1, PLACEHOLDER_VOCABULARY
    # Full attention: training (`UnrolledPacking`) knows of no window.
    if getattr(decoder, "layer_types", None) == ["sliding_attention"]:
        decoder.layer_types = ["full_attention"]
    decoder.sliding_window = None
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(decoder, key, None)
    config.tie_word_embeddings = False
    return config
