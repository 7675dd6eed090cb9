"""The tiny reward model: it tells right sums of the tiny policy from wrong ones.

`python -m scripts.tiny_reward_model --output DIR` writes a Hugging Face folder with a sequence
classification model of one label. Its tokenizer is its own: a token is a term, a running sum or an
answer, so that responses are short, and embeddings begin with waves over the numbers, which make
sums easy to check. It learns from worked solutions with mistakes at any place. A second head learns
whether each step is right, as one label a response is too little to begin with, and is not saved.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from bubblespec.data.prompts import reasoning_gym_rows
from scripts.tiny_policy import HELD_OUT_SEED, MIXTURE, is_correct, sample_responses

TASKS = MIXTURE[:1]  # sums of two to five numbers
SEED = 3000  # of the first pool of problems; none of the policy's
PAD, OTHER = "<pad>", "<other>"
QUESTION = "State the final answer to the following arithmetic problem: "
PIECES = Regex(rf"{QUESTION}| [+-] \d| = [+-]\d\d|<answer>-?\d+</answer>| =|\d|\s|\S")
LARGEST = 99  # of the sums that have tokens
WIDTH, LAYERS, HEADS, MAX_POSITIONS = 64, 3, 4, 512
PERIODS = (2, 3, 5, 7, 10, 20, 50, 200)  # of the waves over numbers
WAVE = 0.1  # their amplitude
ROWS, POOL_ROWS, WARMUP_STEPS = 128, 1024, 50  # rows of an update; problems drawn at a time
IGNORED = -1.0  # label of a position without a loss
SLIPS = (-10, -3, -2, -1, -1, 1, 1, 2, 3, 10)


def numbers_of_tokens() -> dict[str, int | None]:
    """Return the vocabulary in its order, with the number of each token that has one."""
    numbers = dict[str, int | None].fromkeys([PAD, OTHER, QUESTION, " ="])
    for digit in range(10):
        numbers |= {f"{digit}": digit, f" + {digit}": digit, f" - {digit}": -digit}
    for value in range(-LARGEST, LARGEST + 1):
        numbers |= {f" = {value:+03d}": value, f"<answer>{value}</answer>": value}
    return numbers


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer; a character that is no part of a solution is one unknown token."""
    ids = {token: number for number, token in enumerate(numbers_of_tokens())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=OTHER))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(PIECES, "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=OTHER,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> PreTrainedModel:
    """Make a model from torch's current random state, whose embeddings know the numbers."""
    numbers = list(numbers_of_tokens().values())
    config = LlamaConfig(
        vocab_size=len(numbers),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        num_labels=1,
        dtype="float32",
    )
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for embedding, number in zip(model.model.embed_tokens.weight, numbers, strict=True):
            if number is not None:
                angles = 2 * math.pi * number / torch.tensor(PERIODS)
                waves = torch.cat([angles.sin(), angles.cos()])
                embedding[: len(waves)] = WAVE * waves
    return model


def made_up_solution(entry: dict, chance: random.Random) -> tuple[list[str], list[float], bool]:
    """Return the tokens of a worked chain sum that may have mistakes, labels of them, and of all.

    A sum is right if it follows from the sum before it, a term if it is the problem's, and the
    answer if all is. Four of nine solutions are right; two slip once, two at many places, and one
    has a wrong term. One of ten is cut off, or goes on after its end, which makes it wrong."""
    first, *rest = entry["metadata"]["expression"].split(" ")
    kind, last = chance.choice("rrrrssmmt"), len(rest) // 2
    at = chance.randint(int(kind != "t"), last + int(kind != "t"))
    if kind == "t" and at == 0:
        first = str((int(first) + chance.randint(1, 9)) % 10)
    tokens, labels, total = [first], [float(kind != "t" or at > 0)], int(first)
    for step in range(1, last + 1):
        sign, term, is_other = (
            rest[2 * step - 2],
            int(rest[2 * step - 1]),
            kind == "t" and at == step,
        )
        if is_other:
            other = "-" if sign == "+" else "+", (term + chance.randint(1, 9)) % 10
            sign, term = chance.choice([(other[0], term), (sign, other[1])])
        slip = slip_of(kind, at == step, chance)
        total += (term if sign == "+" else -term) + slip
        tokens += [f" {sign} {term}", f" = {total:+03d}"]
        labels += [float(not is_other), float(slip == 0)]
    slip = slip_of(kind, at == last + 1, chance)
    tokens.append(f"<answer>{total + slip}</answer>")
    labels.append(float(all(labels) and slip == 0))
    is_right = bool(labels[-1])
    if chance.random() < 0.1:
        end, is_right = chance.randint(1, len(tokens)), False
        tokens = [*tokens, chance.choice([*tokens, OTHER])] if end == len(tokens) else tokens[:end]
        labels = [*labels, 0.0][: len(tokens)]
    return tokens, labels, is_right


def slip_of(kind: str, is_here: bool, chance: random.Random) -> int:
    """Return by how much a sum is wrong. kind: s has one slip, which is_here or not, m has many."""
    has_slip = (kind == "s" and is_here) or (kind == "m" and chance.random() < 0.4)
    return chance.choice([*SLIPS, chance.randint(-20, 20)]) if has_slip else 0


def batches(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield ids and labels of tokens, each [rows, tokens], last positions and labels of rows."""
    chance, pool = random.Random(seed), SEED + 1000 * seed
    while True:
        examples = []
        for row in reasoning_gym_rows(TASKS, POOL_ROWS, pool):
            tokens, labels, is_right = made_up_solution(row["entry"], chance)
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = prompt + tokenizer.convert_tokens_to_ids(tokens)
            examples.append((ids, [IGNORED] * len(prompt) + labels, float(is_right)))
        examples.sort(key=lambda example: len(example[0]))
        parts = [examples[begin : begin + ROWS] for begin in range(0, POOL_ROWS, ROWS)]
        for part in chance.sample(parts, len(parts)):
            sizes = [len(ids) for ids, *_ in part]
            padding = [sizes[-1] - size for size in sizes]
            ids = [ids + [0] * count for (ids, *_), count in zip(part, padding, strict=True)]
            labels = [of + [IGNORED] * n for (_, of, _), n in zip(part, padding, strict=True)]
            are_right = torch.tensor([is_right for *_, is_right in part])
            yield torch.tensor(ids), torch.tensor(labels), torch.tensor(sizes) - 1, are_right
        pool += 1


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace
) -> list[float]:
    """Train, and return the loss of the responses' labels in each update (nats)."""
    of_steps, rate, losses = torch.nn.Linear(WIDTH, 1), options.learning_rate, list[float]()
    weights = [*model.parameters(), *of_steps.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    source = batches(tokenizer, options.seed)
    with tqdm(total=options.max_steps, desc="reward model", unit="step") as progress:
        for step in range(options.max_steps):
            for group in optimizer.param_groups:
                warm, done = min(1.0, (step + 1) / WARMUP_STEPS), step / options.max_steps
                group["lr"] = rate * warm * (1.0 - 0.95 * done)
            ids, labels, last, are_right = next(source)
            hidden, known = model.base_model(input_ids=ids).last_hidden_state, labels != IGNORED
            logits = model.score(hidden[torch.arange(len(ids)), last])[:, 0]
            loss = cross_entropy(logits, are_right)
            steps_loss = cross_entropy(of_steps(hidden[known])[:, 0], labels[known])
            (loss + steps_loss).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update()
            progress.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
    return losses


@torch.no_grad()
def measure_quality(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace
) -> dict[str, float]:
    """Measure how well logits tell right samples of the policy from wrong ones.

    The problems are held out. auc: chance that a right sample has the higher logit."""
    of_policy = PreTrainedTokenizerFast.from_pretrained(options.policy)
    policy = AutoModelForCausalLM.from_pretrained(options.policy).eval()
    rows = reasoning_gym_rows(TASKS, options.problems, HELD_OUT_SEED)
    responses = sample_responses(policy, of_policy, [row["prompt"] for row in rows])
    pairs = list(zip(rows, responses, strict=True))
    is_right = torch.tensor([is_correct(of_policy, row, ids) for row, ids in pairs])
    texts = [row["prompt"] + of_policy.decode(ids, skip_special_tokens=True) for row, ids in pairs]
    encoded = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    logits = torch.cat([model(input_ids=ids).logits[:, 0] for ids in encoded])
    higher = logits[is_right][:, None] > logits[~is_right]
    return {
        "problems": len(rows),
        "right": is_right.float().mean().item(),
        "auc": higher.float().mean().item(),
        "accuracy": ((logits > 0) == is_right).float().mean().item(),
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; a bad value ends the program with one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    policy = Path("configs/tiny_policy")
    parser.add_argument("--policy", type=Path, default=policy, help="whose samples measure it")
    for option, default, meaning in (
        ("--max-steps", 2000, "updates"),
        ("--seed", 0, "seed of weights and problems"),
        ("--learning-rate", 3e-3, "learning rate at its peak"),
        ("--problems", 1024, "held-out problems measured at the end"),
    ):
        parser.add_argument(option, type=type(default), default=default, help=meaning)
    options = parser.parse_args(arguments)
    if options.max_steps < 1 or options.learning_rate <= 0:
        sys.exit("error: --max-steps and --learning-rate must be positive")
    if options.seed < 0 or options.problems < 2:
        sys.exit("error: --seed must be at least 0, and --problems at least 2")
    if not options.policy.is_dir():
        sys.exit(f"error: --policy: there is no folder {options.policy}")
    if options.output.exists() and not options.output.is_dir():
        sys.exit(f"error: --output {options.output} is not a folder")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train, save and measure the tiny reward model, on one thread."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer, model = build_tokenizer(), build_model()
    begin = time.monotonic()
    losses = train(model, tokenizer, options)
    seconds = time.monotonic() - begin
    model.eval().save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    quality = measure_quality(model, tokenizer, options) | {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "steps": len(losses),
        "seconds": round(seconds, 1),
        "first_loss": losses[0],
        "last_loss": sum(losses[-50:]) / len(losses[-50:]),
    }
    (options.output / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")
    print(json.dumps(quality, indent=2))


if __name__ == "__main__":
    main()
