"""Layers with a state on a CPU: OMP_NUM_THREADS=1 python benchmarks/states.py [--hidden N]

A gated delta layer of Qwen3.5-0.8B's shape, by itself: rows that verify four tokens against rows
that decode one. Then forwards of four layers, one of them with attention, next to transformers'
own with its cache. Random weights, float32.
"""

import argparse
import os
import sys
from collections.abc import Callable

import numpy as np
import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from bubblespec.engine.arrays import median_s
from bubblespec.engine.decoder import Decoder, stacked
from bubblespec.engine.kv_cache import KVCache, pack_rows
from bubblespec.engine.model import state_layers
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.states import StateCache

LENGTH, PROMPT, WINDOW = 192, 100, 64


def make_model(hidden: int) -> Qwen3_5ForCausalLM:
    """Create four layers; hidden: 1024 for the shape of Qwen3.5-0.8B."""
    config = Qwen3_5TextConfig(
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=4,
        num_attention_heads=hidden // 128,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=hidden // 64,
        linear_num_value_heads=hidden // 64,
        vocab_size=512,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    prepare_model(model, LENGTH)
    return model


def forwards(model, decoder: Decoder, rows: int) -> Callable[[int], Callable[[], object]]:
    """Return, for a number of tokens, a call that feeds each row so many and keeps all of them."""
    states = StateCache(rows, state_layers(model), WINDOW)
    cache = KVCache(rows, LENGTH, num_layers=1, states=states)
    device, start = model.device, np.zeros(rows, np.int64)

    def feed(width: int, count: np.ndarray) -> torch.Tensor:
        packing = pack_rows(cache, start.copy(), count, device)
        return decoder.hidden(torch.ones(rows * width, dtype=torch.int64), packing)

    feed(PROMPT, np.full(rows, PROMPT))

    def make(width: int) -> Callable[[], object]:
        def call() -> torch.Tensor:
            start[:] = PROMPT + 1  # the same place again: what is kept of the window is one token
            states.base[:rows], states.waiting[:rows] = PROMPT, width
            return feed(width, np.full(rows, width))

        return call

    return make


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=1024)
    model = make_model(parser.parse_args().hidden)
    decoder = Decoder(model, stacked(model))
    layers, alone = decoder.layers, Decoder(model, stacked(model))
    alone.layers = layers[:1]
    print("rows  tokens  layer ms  forward ms  transformers ms")
    for rows in (1, 8, 16):
        of_layer, whole = (forwards(model, of, rows) for of in (alone, decoder))
        cache = DynamicCache(config=model.config)
        model.set_attn_implementation("sdpa")
        model(torch.ones(rows, PROMPT, dtype=torch.int64), past_key_values=cache)
        token = torch.ones(rows, 1, dtype=torch.int64)
        own = lambda cache=cache, token=token: model.model(token, past_key_values=cache)  # noqa: E731
        own_s = median_s(own)
        for width in (1, 4):
            found = [median_s(of(width)) * 1e3 for of in (of_layer, whole)]
            last = f"{own_s * 1e3:10.2f}" if width == 1 else ""
            print(f"{rows:4} {width:7} {found[0]:9.2f} {found[1]:11.2f} {last}", flush=True)


if __name__ == "__main__":
    main()
