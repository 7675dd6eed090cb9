"""A head for multi-token prediction for the tiny hybrid policy, as Qwen3.5 comes with one.

`python -m scripts.tiny_head --policy DIR` trains it on the policy's own responses and writes it
into the folder's weights, as `mtp.*`. transformers leaves such tensors out; a run drafts with them.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from bubblespec.data.prompts import reasoning_gym_rows
from bubblespec.distributed.ranks import Ranks
from bubblespec.engine.model_checks import prepare_model
from bubblespec.mechanisms.drafter.heads import FAMILIES, places
from bubblespec.mechanisms.drafter.layer import HeadDrafter
from bubblespec.mechanisms.drafter.training import DrafterTraining, examples_from, warm_up
from bubblespec.types import Row, SampleId
from scripts.tiny_policy import MAX_POSITIONS, MIXTURE, SUPERVISED_SEED, sample_responses

PROMPTS_SEED = SUPERVISED_SEED - 2  # of no other data


def make_head(
    model, tokenizer: PreTrainedTokenizerFast, num_prompts: int, seed: int
) -> dict[str, torch.Tensor]:
    """Return the tensors of a head, by name, trained on responses to so many prompts."""
    problems = reasoning_gym_rows(MIXTURE, num_prompts, PROMPTS_SEED)
    prompts = [row["prompt"] for row in problems]
    responses = sample_responses(model, tokenizer, prompts)
    rows = []
    for number, (prompt, tokens) in enumerate(zip(prompts, responses, strict=True)):
        ids = tuple(tokenizer(prompt)["input_ids"])
        row = Row(SampleId(number, 0, 0), ids, len(tokens))
        row.tokens = np.array(tokens)
        rows.append(row)
    prepare_model(model, MAX_POSITIONS)
    drafter = HeadDrafter(model, np.arange(len(tokenizer)), seed)
    training = DrafterTraining(drafter, temperature=1.0, seed=seed)
    warm_up(training, examples_from(model, rows, "sdpa"), Ranks(torch.device("cpu")))
    own = places(drafter, FAMILIES[0])
    return {f"mtp.{name}": tensor.detach().clone() for name, tensor in own}


def main(arguments: list[str] | None = None) -> None:
    """Train a head and write it next to the policy's weights."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", type=Path, required=True, help="folder of the policy")
    parser.add_argument("--prompts", type=int, default=3000, help="prompts that it answers")
    parser.add_argument("--seed", type=int, default=0, help="of the policy's samples and the head")
    options = parser.parse_args(arguments)
    weights = options.policy / "model.safetensors"
    if not weights.is_file():
        sys.exit(f"error: --policy {options.policy} has no {weights.name}")
    if options.prompts < 1 or options.seed < 0:
        sys.exit("error: --prompts must be at least 1, --seed at least 0")
    torch.manual_seed(options.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.policy)
    model = AutoModelForCausalLM.from_pretrained(options.policy)
    head = make_head(model, tokenizer, options.prompts, options.seed)
    save_file(load_file(weights) | head, weights, {"format": "pt"})
    count = sum(tensor.numel() for tensor in head.values())
    print(f"wrote a head of {count:,} parameters into {weights}")


if __name__ == "__main__":
    main()
