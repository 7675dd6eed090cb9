"""The tiny reward model: it tells right sums of the tiny policy from wrong ones.

`python -m scripts.tiny_reward_model --output DIR` writes a Hugging Face folder with a sequence
classification model of one label. It begins as a copy of the tiny policy's layers, which predict
the right next token, and further ones, which can compare it with the token that is there. It learns
from worked solutions with slips at any place, and from samples of the policy. The tokens of a
response have labels, too, whether the step that they end is right: a label of the whole response
alone is too little to learn from.
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
# Weights of the tasks, at first and after RAMP_POOLS pools: a step is learned on short problems.
FIRST_WEIGHTS, LAST_WEIGHTS, RAMP_POOLS = [1.0, 0.02, 0.0, 0.0], [0.6, 0.25, 0.1, 0.05], 40
LAYERS = 5
POOL_ROWS = 512
BATCH_TOKENS = 3000  # padded tokens of an update
WARMUP_STEPS = 50
IGNORED = -1.0  # label of positions without a loss


def flawed_solution(
    tokenizer: PreTrainedTokenizerFast, entry: dict, slips: random.Random
) -> tuple[list[int], list[float]]:
    """Return the tokens of a worked chain sum that may slip, and their labels.

    Half of the solutions are right, a quarter slip once, and a quarter at many places. A step is
    right if it follows from the sum before it, and the last token if all steps are."""
    parts = entry["metadata"]["expression"].split(" ")
    total, last = int(parts[0]), len(parts) // 2
    kind, at = slips.choice("rrom"), slips.randint(1, last + 1)
    pieces = [(parts[0], parts[0])]  # as they are, and as they would be right
    for step in range(1, last + 2):
        is_slip = (kind == "o" and step == at) or (kind == "m" and slips.random() < 0.4)
        by = slips.choice([-10, -3, -2, -1, 1, 2, 3, 10]) if is_slip else 0
        if step > last:
            pieces += [("<answer>", "<answer>"), (f"{total + by}", f"{total}")]
        else:
            operator, term = parts[2 * step - 1], int(parts[2 * step])
            total += term if operator == "+" else -term
            pieces += [(f" {operator} {term} = ",) * 2, (f"{total + by:+03d}", f"{total:+03d}")]
            total += by
    tokens, labels = list[int](), list[float]()
    texts = [text for pair in pieces for text in pair]
    ids_of = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for ids, right in zip(ids_of[::2], ids_of[1::2], strict=True):
        tokens += ids
        labels += up_to_mistake(ids, right)
    (end,) = tokenizer("</answer>", add_special_tokens=False)["input_ids"]
    return [*tokens, end], [*labels, float(all(wrong == right for wrong, right in pieces))]


def up_to_mistake(tokens: list[int], right: list[int]) -> list[float]:
    """Return labels of tokens: 1 up to the first one that differs, which has 0, then unknown."""
    labels = [IGNORED] * len(tokens)
    for index, token in enumerate(tokens):
        labels[index] = float(index < len(right) and token == right[index])
        if not labels[index]:
            break
    return labels


def of_sample(
    tokenizer: PreTrainedTokenizerFast, entry: dict, response: str
) -> tuple[list[int], list[float]]:
    """Return the tokens of a sample of the policy, and their labels.

    They are known up to the first mistake, and at the last token."""
    tokens, right = tokenizer([response, worked_solution(entry)], add_special_tokens=False)[
        "input_ids"
    ]
    labels = up_to_mistake(tokens, right)
    labels[-1:] = [float(tokens == right)]
    return tokens, labels


def batches(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, seed: int, num_samples: int
):
    """Yield ids, mask and labels of updates, each [sequences, tokens], padded on the right.

    Worked solutions are new in each pool; the policy's samples come up again and again."""
    shuffle = random.Random(seed)

    def pair(row: dict, response: tuple[list[int], list[float]]) -> tuple[list[int], list[float]]:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        return prompt + response[0], [IGNORED] * len(prompt) + response[1]

    rows = reasoning_gym_rows(MIXTURE, num_samples, SEED + 1000 * seed)
    sampled = sample_responses(policy, tokenizer, [row["prompt"] for row in rows])
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    of_policy = [
        pair(row, of_sample(tokenizer, row["entry"], text))
        for row, text in zip(rows, texts, strict=True)
    ]
    for pool in range(1, sys.maxsize):
        share = min(pool / RAMP_POOLS, 1.0)
        tasks = [
            {**task, "weight": (1.0 - share) * first + share * last}
            for task, first, last in zip(MIXTURE, FIRST_WEIGHTS, LAST_WEIGHTS, strict=True)
        ]
        rows = reasoning_gym_rows(tasks, POOL_ROWS, SEED + 1000 * seed + pool)
        pairs = [pair(row, flawed_solution(tokenizer, row["entry"], shuffle)) for row in rows]
        pairs += shuffle.sample(of_policy, int(share * min(len(of_policy), POOL_ROWS)))
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
    """Return the mean cross-entropy of the last tokens' labels, plus that of the others."""
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    logits, is_labelled = model.score(hidden)[..., 0], labels != IGNORED
    rows, last = torch.arange(len(ids)), mask.sum(1) - 1
    is_labelled[rows, last] = False
    wanted = labels[is_labelled]
    # Few tokens are mistakes, and all of them together count as much as the others.
    weight = torch.where(wanted == 0, 0.5 / (wanted == 0).sum(), 0.5 / (wanted == 1).sum())
    of_steps = binary_cross_entropy_with_logits(
        logits[is_labelled], wanted, weight, reduction="sum"
    )
    return of_steps + binary_cross_entropy_with_logits(logits[rows, last], labels[rows, last])


def train(
    model: PreTrainedModel, policy: PreTrainedModel, tokenizer, options: argparse.Namespace
) -> list[float]:
    """Train until a limit is met; return every loss (nats)."""
    rate, begin, losses = options.learning_rate, time.monotonic(), list[float]()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
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
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
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
        ("--samples", 256, "samples of the policy to learn from"),
        ("--seed", 0, "seed of problems and samples"),
        ("--learning-rate", 3e-3, "learning rate at its peak"),
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
    model.base_model.requires_grad_(False)
    add_layers(model, LAYERS)
    for layer in (*model.model.layers[policy.config.num_hidden_layers :], model.model.norm):
        layer.requires_grad_(True)
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
