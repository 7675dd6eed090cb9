"""EAGLE-3's drafter (arXiv 2503.01840): one Llama layer over states of three layers of the policy.

`fc` makes one vector of the states in front of three of the policy's layers. Attention reads it,
and the embedding of the token after it, side by side; where the policy's states are not known yet,
the drafter continues from its own output. It has an output head of its own for some of the policy's
tokens; the embedding is the policy's.

A folder (`config.json`, `model.safetensors`) is what vLLM and SGLang serve: the layer's tensors are
`midlayer.*` or `layers.0.*`, and `d2t` is the policy's token id minus the drafter's. A layer's
number means its input, as in vLLM; SGLang's numbers (`eagle_config`) are lower by one.

Shape legend: N positions, H hidden size, V token ids that the drafter knows.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from bubblespec.checkpoint import add_old_keys
from bubblespec.engine import attention
from bubblespec.engine.model import body_of, of_layers, output_head
from bubblespec.loading import is_hub_reachable
from bubblespec.mechanisms.drafter.layer import PLACEHOLDER_VOCABULARY, Drafter, last_full_layer

NUM_TAPS = 3
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
ARCHITECTURE = "LlamaForCausalLMEagle3"  # vLLM's and SGLang's name


class Eagle3(Drafter):
    """A Llama layer with two inputs, norms and an output head; see this module."""

    def __init__(
        self,
        policy: PreTrainedModel,
        ids: np.ndarray,
        seed: int = 0,
        config: LlamaConfig | None = None,
        taps: tuple[int, ...] | None = None,
    ):
        """ids: see `Drafter`. config: of the layer, by default one of the policy's sizes.

        Raises ValueError for a layer that does not fit the policy."""
        super().__init__(policy, ids)
        decoder = policy.config.get_text_config(decoder=True)
        self.taps = tapped_layers(decoder.num_hidden_layers) if taps is None else taps
        self.config = config or config_like(policy.config)
        size, width = self.config.hidden_size, decoder.hidden_size
        if size != width:
            raise ValueError(f"its hidden_size is {size}, but the policy's {width}")
        embedding: Any = policy.get_input_embeddings()
        if (embedded := embedding.weight.shape[1]) != width:
            raise ValueError(f"the policy's embeddings have {embedded} numbers, not {width}")
        options: dict[str, Any] = {"device": policy.device, "dtype": policy.dtype}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body: Any = LlamaModel(self.config)
            body.set_attn_implementation(attention.NAME)
            self.rotary, self.midlayer = body.rotary_emb, body.layers[0]
            heads, has_bias = body.layers[0].self_attn, self.config.attention_bias
            for name in ("q_proj", "k_proj", "v_proj"):
                outputs = getattr(heads, name).out_features
                setattr(heads, name, torch.nn.Linear(2 * size, outputs, bias=has_bias))
            self.midlayer.hidden_norm = type(body.norm)(size, eps=self.config.rms_norm_eps)
            has_bias = bool(getattr(self.config, "bias", False))
            self.fc = torch.nn.Linear(NUM_TAPS * size, size, bias=has_bias)
            self.norm = body.norm
            self.lm_head = torch.nn.Linear(size, len(self.ids), bias=False)
        self.to(**options)
        self.eval()
        # Whether what goes around the attention is normed, too (speculators).
        self.norms_residual = bool(getattr(self.config, "norm_before_residual", False))
        if config is None:
            self._start_from_policy()

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(hidden[..., self.hidden_size :])

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, packing, kernel: str = "sdpa"
    ) -> torch.Tensor:
        layer: Any = self.midlayer
        embedded, normed = layer.input_layernorm(self.embedded(tokens)), layer.hidden_norm(hidden)
        residual = normed if self.norms_residual else hidden
        attended, _ = layer.self_attn(
            hidden_states=torch.cat((embedded, normed), dim=-1)[None],
            position_embeddings=self.rotary(hidden[None], packing.position[None]),
            packing=packing,
            kernel=kernel,
        )
        residual = residual + attended[0]
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(states))

    @torch.no_grad()
    def _start_from_policy(self) -> None:
        """Copy what fits of the policy's last layer with full attention, and of what follows it.

        The drafter then begins as that layer on what goes into the last layer tapped."""
        size, number = self.hidden_size, last_full_layer(self.policy.config)
        head: Any = output_head(self.policy)
        self.lm_head.weight.copy_(head.linear.weight[self.device_ids] * head.factor)
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size, dtype=self.policy.dtype)
        known = {
            name.removeprefix(f"layers.{number}.").replace(".base_layer.", "."): tensor
            for name, tensor in body_of(self.policy).state_dict().items()
        }
        known["hidden_norm.weight"] = known.get("input_layernorm.weight")
        for name, tensor in self.midlayer.named_parameters():
            found = known.get(name)
            if found is None or tensor.dim() != found.dim() or len(tensor) != len(found):
                continue
            if tensor.shape == found.shape:
                tensor.copy_(found)
            elif tensor.shape[1] == 2 * found.shape[1]:
                tensor[:, :size] = 0
                tensor[:, size:] = found
        if (found := known.get("norm.weight")) is not None and found.shape == (size,):
            self.norm.weight.copy_(found)


def tapped_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that vLLM and SGLang read by default, as far as there are so many."""
    low, high = min(2, num_layers - 1), max(num_layers - 3, 0)
    return low, num_layers // 2, high


def config_like(config: PreTrainedConfig) -> LlamaConfig:
    """Return the configuration of a Llama layer of the policy's sizes."""
    decoder: Any = config.get_text_config(decoder=True)
    number = last_full_layer(config)
    heads = of_layers(config, "num_attention_heads")[number]
    size = of_layers(config, "head_dim")[number] or decoder.hidden_size // heads
    rope = getattr(decoder, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta", 10_000.0)
    wide = of_layers(config, "intermediate_size")[number]
    return LlamaConfig(
        hidden_size=decoder.hidden_size,
        intermediate_size=wide or 4 * decoder.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=of_layers(config, "num_key_value_heads")[number] or heads,
        head_dim=size - size % 2,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=getattr(decoder, "max_position_embeddings", None) or 2048,
        rms_norm_eps=getattr(decoder, "rms_norm_eps", None) or 1e-6,
        vocab_size=PLACEHOLDER_VOCABULARY,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def read_eagle3(path: str, policy: PreTrainedModel) -> Eagle3:
    """Read a drafter from a folder, or from the cache or the hub by its name.

    Raises OSError for what is not there, and ValueError for what is no drafter of this policy."""
    content = json.loads(Path(_file(path, CONFIG_FILE)).read_text("utf-8"))
    tensors = dict(_renamed(_tensors(path)))
    if "fc.weight" not in tensors:
        raise ValueError("it has no fc.weight: it is not an EAGLE-3 drafter")
    offsets = tensors.pop("d2t", None)
    head = tensors.get("lm_head.weight", policy.get_output_embeddings().weight.detach())
    ids = torch.arange(len(head)) + (0 if offsets is None else offsets.long())
    if (most := len(policy.get_output_embeddings().weight)) <= ids.max():
        raise ValueError(f"d2t: the policy has no token {int(ids.max())}, only {most}")
    ids, order = ids.sort()
    tensors["lm_head.weight"] = head[order]
    config, taps = _read_config(content, policy.config.get_text_config(decoder=True))
    drafter = Eagle3(policy, ids.numpy(), config=config, taps=taps)
    wanted = drafter.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        shapes = [list(of[name].shape) if name in of else None for of in (tensors, wanted)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} is {shapes[0]}, by its {CONFIG_FILE} {shapes[1]}")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise ValueError("its weights are not numbers")
    drafter.load_state_dict(tensors)
    return drafter


def save_eagle3(folder: str, drafter: Eagle3) -> None:
    """Write a folder that `read_eagle3`, vLLM and SGLang read. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    rows = len(drafter.policy.get_output_embeddings().weight)
    state = {name: t.detach().cpu().contiguous() for name, t in drafter.state_dict().items()}
    ids, is_drafted = torch.from_numpy(drafter.ids), torch.zeros(rows, dtype=torch.bool)
    is_drafted[ids] = True
    state |= {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}
    save_file(state, os.path.join(folder, WEIGHTS_FILE), {"format": "pt"})
    content = drafter.config.to_dict() | {
        "architectures": [ARCHITECTURE],
        "vocab_size": rows,
        "draft_vocab_size": len(ids),
        "dtype": str(drafter.policy.dtype).removeprefix("torch."),
        "norm_before_residual": drafter.norms_residual,
    }
    num_layers = drafter.policy.config.get_text_config(decoder=True).num_hidden_layers
    if drafter.taps != (2, num_layers // 2, num_layers - 3):  # the default of both
        content |= {AUX_LAYERS: list(drafter.taps)}  # vLLM
        content |= {"eagle_config": {AUX_LAYERS: [n - 1 for n in drafter.taps]}}  # SGLang
    text = json.dumps(content, indent=2, sort_keys=True)
    Path(folder, CONFIG_FILE).write_text(f"{text}\n", "utf-8")
    add_old_keys(folder, LlamaConfig.from_dict)


def _read_config(content: dict, policy: Any) -> tuple[LlamaConfig, tuple[int, ...]]:
    """Return the configuration of a drafter's layer, and the policy's layers that it reads."""
    num_layers, layer = policy.num_hidden_layers, content.get("transformer_layer_config", {})
    taps = content.get(AUX_LAYERS) or [
        n + 1 for n in (content.get("eagle_config") or {}).get(AUX_LAYERS) or ()
    ]
    taps = tuple(taps or tapped_layers(num_layers))
    if len(taps) != NUM_TAPS or not all(0 <= number < num_layers for number in taps):
        raise ValueError(f"{AUX_LAYERS}: the policy has no layers {taps}, only {num_layers}")
    config = LlamaConfig.from_dict({**content, **layer, "vocab_size": PLACEHOLDER_VOCABULARY})
    if config.num_hidden_layers != 1:
        raise ValueError(f"it has {config.num_hidden_layers} layers; EAGLE-3 has one")
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return config, taps


def _file(path: str, name: str) -> str:
    """Return a file of a folder, or of a repository in the cache or on the hub."""
    if not os.path.isdir(path) and not is_hub_reachable():
        found = cached_file(path, name, local_files_only=True)
    else:
        found = cached_file(path, name)
    assert found is not None
    return found


def _tensors(path: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(_file(path, WEIGHTS_FILE))
    except OSError:  # older drafters are saved by torch alone
        return torch.load(_file(path, "pytorch_model.bin"), map_location="cpu", weights_only=True)


def _renamed(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a drafter's tensors by our names, without what is the policy's or follows from d2t."""
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if name not in ("embed_tokens.weight", "t2d"):
            yield name.replace("layers.0.", "midlayer.", 1), tensor
