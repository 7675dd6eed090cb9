"""Which architectures of the installed transformers are served:
python tests/system/architectures.py [--only NAME ...]

Builds a small random model of each causal language model in float64, lets `model.generate` and the
engine continue four prompts greedily, and prints how many give the same tokens, how many are
refused, and why. Any other outcome is a mistake: the command then ends with 1.
"""

import argparse
import os
import signal
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.errors import InputError
from bubblespec.types import Row, SampleId
from tests.helpers.models import VOCAB, config_of
from tests.test_architectures import SERVED

LENGTH, NEW = 48, 20
MAX_PARAMETERS, LIMIT_S = 20_000_000, 120
# What a configuration's numbers become, where it has them.
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2}
SMALL |= {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 96}
SMALL |= {"d_model": 64, "n_layers": 2, "n_heads": 4, "num_layers": 2, "num_heads": 4}
SMALL |= {"ffn_dim": 96, "d_ff": 96, "kv_channels": 16, "rotary_dim": 16, "word_embed_proj_dim": 64}
SMALL |= {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1}
SMALL |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1}
SMALL |= {"shared_expert_intermediate_size": 32, "shared_intermediate_size": 32}
SMALL |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_k": 2, "moe_topk": 2}
SMALL |= {"q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16, "qk_nope_head_dim": 16}
SMALL |= {
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "sliding_window": 16,
    "attention_chunk_size": 16,
}
SMALL |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
SMALL |= {"linear_value_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
SMALL |= {"mamba_n_groups": 2, "mamba_chunk_size": 16, "mamba_d_ssm": 128, "mamba_num_heads": 8}
SMALL |= {"mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
SMALL |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
SMALL |= {"global_head_dim": 32, "num_kv_shared_layers": 0, "query_pre_attn_scalar": 16}
SMALL |= {"embedding_size": 64, "lru_width": 64, "ffn_hidden_size": 96, "num_key_value_groups": 2}
SMALL |= {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None, "is_decoder": True}
KINDS = ("linear_attention", "conv", "hybrid", "chunked_attention", "sliding_attention")
KINDS += ("full_attention", "moe", "mlp")


class TooLong(Exception):
    """A model took too long."""


def is_of(entry: tuple, kind: str) -> bool:
    """Whether an entry of the tests is of a model type."""
    return getattr(transformers, f"{entry[0]}Config").model_type == kind


def small_model(kind: str) -> transformers.PreTrainedModel:
    """Build a small model of a model type; raise what transformers raises."""
    tested = [partial(config_of, *entry) for entry in SERVED.values() if is_of(entry, kind)]
    for number, make in enumerate(configs := tested or guesses(kind)):
        try:
            config = make()
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
                raise ValueError("its numbers have other names")
            break
        except Exception:
            if number == len(configs) - 1:
                raise
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.std() > 0:  # routers begin as zeros
            torch.nn.init.normal_(parameter, std=0.2)
    return model.double()


def guesses(kind: str) -> list[Callable]:
    """Return calls that may make a small configuration of a model type."""
    defaults = transformers.CONFIG_MAPPING[kind]()
    text = defaults.get_text_config(decoder=True)
    given = {key: value for key, value in SMALL.items() if hasattr(text, key)}
    if "kv_lora_rank" in given:  # latent attention
        given |= {"num_key_value_heads": 4, "head_dim": 8}
    if kinds := getattr(text, "layer_types", None):
        found = [of for of in KINDS if of in kinds] or sorted(set(kinds))
        if not {"hybrid", "full_attention", "sliding_attention"} & set(found):
            found.append("full_attention")
        given |= {"layer_types": found, "num_hidden_layers": len(found)}
    without = ("layer_types", "head_dim")
    attempts = [given, {key: of for key, of in given.items() if key != "layer_types"}]
    attempts += [{key: of for key, of in given.items() if key not in without}]
    attempts += [of | {"bos_token_id": 1, "eos_token_id": 2} for of in attempts]
    return [partial(type(text), **options) for options in attempts]


def outcome(kind: str) -> str:
    """Return "served", or why not."""
    try:
        reference, model = small_model(kind), small_model(kind)
        rng = np.random.default_rng(0)
        prompts = [tuple(rng.integers(1, VOCAB, n).tolist()) for n in (1, 9, 21, 28)]
        if hasattr(reference.config, "num_experts_per_tok"):
            reference.set_experts_implementation("eager")
        greedy = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        config = GenerationConfig(**greedy, pad_token_id=0)
        wanted = [
            reference.generate(torch.tensor([p]), generation_config=config)[0, len(p) :].tolist()
            for p in prompts
        ]
    except TooLong:
        raise
    except Exception as error:
        return f"not built: {' '.join(str(error).split())[:100]}"
    try:
        prepare_model(model, LENGTH)
    except (ValueError, InputError) as error:
        return f"refused: {str(error).partition(': ')[2]}"
    runner = ModelRunner(model, 2, LENGTH, seed=0, max_num_batched_tokens=16)
    rows = [Row(SampleId(i, 1, 0), prompt, NEW) for i, prompt in enumerate(prompts)]
    Engine(runner).run(rows, SamplingParams(temperature=0.0))
    is_same = [row.tokens.tolist() for row in rows] == wanted
    return "served" if is_same else "OTHER TOKENS"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", help="model types")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def interrupt(*arguments) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, interrupt)
    found = defaultdict(list)
    for kind in only or sorted(NAMES):
        signal.alarm(LIMIT_S)
        try:
            result = outcome(kind)
        except TooLong:
            result = "not built: it takes too long"
        except Exception as error:
            result = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        signal.alarm(0)
        found[result.partition(":")[0]].append(kind)
        print(f"{kind}: {result}", flush=True)
    for result, kinds in sorted(found.items()):
        print(f"{len(kinds)} {result}")
    return int(bool(found["OTHER TOKENS"] or found["FAILED"]))


if __name__ == "__main__":
    sys.exit(main())
