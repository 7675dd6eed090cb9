"""The tiny reward model: it tells right sums of the tiny policy from wrong ones.

`python -m scripts.tiny_reward_model --output DIR` writes a Hugging Face folder with a sequence
classification model of one label. It begins as a copy of the tiny policy's layers, which predict
the right next token, and further ones, which can compare it with the token that is there. It learns
from two kinds of responses in equal shares: samples of the policy, and worked solutions with slips
at any place. Every token of a response has a label, whether the response is right up to there: the
last one alone is too little to learn from.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from bubblespec.data.prompts import reasoning_gym_rows
from scripts.tiny_policy import (
    HELD_OUT_SEED,
    MIXTURE,
    add_layers,
    is_correct,
    sample_responses,
    worked_solution,
)

SEED = 3000  # of the first pool of problems; not one of the policy's
WEIGHTS = [0.35, 0.25, 0.25, 0.15]  # of the tasks: long problems have more places for mistakes
LAYERS = 5
POOL_ROWS = 1024
BATCH_TOKENS = 3000  # padded tokens of an update
WARMUP_STEPS = 50
IGNORED = -1.0  # label of positions without a loss


def flawed_solution(entry: dict, slips: random.Random) -> str:
    """Return the worked solution of a chain sum; half of them slip once, at any place."""
    parts = entry["metadata"]["expression"].split(" ")
    total, text, last = int(parts[0]), parts[0], len(parts) // 2
    slip_at = slips.randint(1, last + 1) if slips.random() < 0.5 else None
    slip_by = slips.choice([-10, -3, -2, -1, 1, 2, 3, 10])
    for step in range(1, last + 1):
        operator, term = parts[2 * step - 1], int(parts[2 * step])
        total += (term if operator == "+" else -term) + (slip_by if step == slip_at else 0)
        text += f" {operator} {term} = {total:+03d}"
    total += slip_by if slip_at == last + 1 else 0
    return f"{text}<answer>{total}</answer>"


def labelled(
    tokenizer: PreTrainedTokenizerFast, row: dict, response: str
) -> tuple[list[int], list[float]]:
    """Return the tokens of prompt and response, and their labels: 1 up to the first mistake."""
    prompt, tokens, right = tokenizer(
        [row["prompt"], response, worked_solution(row["entry"])], add_special_tokens=False
    )["input_ids"]
    is_right, labels = True, []
    for index, token in enumerate(tokens):
        is_right = is_right and index < len(right) and token == right[index]
        labels.append(float(is_right))
    return prompt + tokens, [IGNORED] * len(prompt) + labels


def batches(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int, num_samples: int
):
    """Yield ids, mask and labels of updates, each [sequences, tokens], padded on the right.

    Worked solutions are new in each pool; the policy's samples come up again and again."""
    shuffle = random.Random(seed)
    rows = reasoning_gym_rows(MIXTURE, num_samples, SEED + 1000 * seed)
    sampled = sample_responses(policy, tokenizer, [row["prompt"] for row in rows])
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    of_policy = [labelled(tokenizer, *pair) for pair in zip(rows, texts, strict=True)]
    tasks = [{**task, "weight": w} for task, w in zip(MIXTURE, WEIGHTS, strict=True)]
    for pool in range(1, sys.maxsize):
        rows = reasoning_gym_rows(tasks, POOL_ROWS // 2, SEED + 1000 * seed + pool)
        pairs = [labelled(tokenizer, row, flawed_solution(row["entry"], shuffle)) for row in rows]
        pairs += shuffle.sample(of_policy, min(len(of_policy), POOL_ROWS // 2))
        pairs.sort(key=len_of)
        chosen = []
        while pairs:
            longest = len_of(pairs[-1])
            count = max(1, BATCH_TOKENS // longest)
            pairs, rows_of = pairs[:-count], pairs[-count:]
            ids = torch.full((len(rows_of), longest), tokenizer.pad_token_id)
            labels = torch.full(ids.shape, IGNORED)
            for number, (tokens, wanted) in enumerate(rows_of):
                ids[number, : len(tokens)] = torch.tensor(tokens)
                labels[number, : len(tokens)] = torch.tensor(wanted)
            chosen.append((ids, (ids != tokenizer.pad_token_id).long(), labels))
        shuffle.shuffle(chosen)
        yield from chosen


def len_of(pair: tuple[list[int], list[float]]) -> int:
    return len(pair[0])


def loss_of(model: PreTrainedModel, ids, mask, labels) -> torch.Tensor:
    """Return the mean cross-entropy of all labels, plus that of each sequence's last label."""
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    logits, is_labelled = model.score(hidden)[..., 0], labels != IGNORED
    last = mask.sum(1) - 1
    rows = torch.arange(len(ids))
    return binary_cross_entropy_with_logits(
        logits[is_labelled], labels[is_labelled]
    ) + binary_cross_entropy_with_logits(logits[rows, last], labels[rows, last])


def train(
    model: PreTrainedModel, policy: PreTrainedModel, tokenizer, options: argparse.Namespace
) -> list[float]:
    """Train until a limit is met; return every loss (nats)."""
    rate, begin, losses = options.learning_rate, time.monotonic(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    source = batches(policy, tokenizer, options.seed, options.samples)
    with tqdm(total=options.max_steps, desc="reward model", unit="step") as progress:
        while len(losses) < options.max_steps:
            spent = (time.monotonic() - begin) / options.seconds
            if (done := max(len(losses) / options.max_steps, spent)) >= 1.0:
                break
            for group in optimizer.param_groups:
                group["lr"] = (
                    rate * min(1.0, (len(losses) + 1) / WARMUP_STEPS) * (1.0 - 0.95 * done)
                )
            loss = loss_of(model, *next(source))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update()
            progress.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
    return losses


@torch.no_grad()
def measure_quality(
    model: PreTrainedModel, policy: PreTrainedModel, tokenizer, count: int
) -> dict[str, float]:
    """Measure how well logits tell right samples of the policy from wrong ones.

    The problems are held out. auc: chance that a right sample has the higher logit."""
    rows = reasoning_gym_rows(MIXTURE, count, HELD_OUT_SEED)
    responses = sample_responses(policy, tokenizer, [row["prompt"] for row in rows])
    is_right = torch.tensor(
        [is_correct(tokenizer, row, ids) for row, ids in zip(rows, responses, strict=True)]
    )
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    logits = torch.cat(
        [
            model(
                **tokenizer(row["prompt"] + text, add_special_tokens=False, return_tensors="pt")
            ).logits[:, 0]
            for row, text in zip(rows, texts, strict=True)
        ]
    )
    higher = logits[is_right][:, None] > logits[~is_right]
    return {
        "problems": count,
        "right": is_right.float().mean().item(),
        "auc": higher.float().mean().item(),
        "accuracy": ((logits > 0) == is_right).float().mean().item(),
    }


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; a bad value ends the program with one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    parser.add_argument("--policy", type=Path, default=Path("configs/tiny_policy"))
    for option, default, meaning in (
        ("--seconds", 900.0, "longest training time"),
        ("--max-steps", 4000, "most updates"),
        ("--samples", 1024, "samples of the policy to learn from"),
        ("--seed", 0, "seed of problems and samples"),
        ("--learning-rate", 1.5e-3, "learning rate at its peak"),
        ("--problems", 512, "held-out problems measured at the end"),
    ):
        parser.add_argument(option, type=type(default), default=default, help=meaning)
    options = parser.parse_args(arguments)
    if min(options.seconds, options.max_steps, options.samples, options.learning_rate) <= 0:
        sys.exit("error: --seconds, --max-steps, --samples and --learning-rate must be positive")
    if options.seed < 0 or options.problems < 2:
        sys.exit("error: --seed must be at least 0, and --problems at least 2")
    if not options.policy.is_dir():
        sys.exit(f"error: --policy: there is no folder {options.policy}")
    if options.output.exists() and not options.output.is_dir():
        sys.exit(f"error: --output {options.output} is not a folder")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train, save and measure the tiny reward model."""
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.policy)
    policy = AutoModelForCausalLM.from_pretrained(options.policy).eval()
    model = AutoModelForSequenceClassification.from_pretrained(options.policy, num_labels=1)
    add_layers(model, LAYERS)
    begin = time.monotonic()
    losses = train(model, policy, tokenizer, options)
    seconds = time.monotonic() - begin
    model.eval().bfloat16().save_pretrained(options.output)
    model.float()
    tokenizer.save_pretrained(options.output)
    quality = measure_quality(model, policy, tokenizer, options.problems) | {
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
