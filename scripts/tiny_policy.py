"""The tiny workload: a small policy, trained from scratch on worked solutions of one-digit sums.

`python -m scripts.tiny_policy --output DIR` writes a Hugging Face folder; with --hybrid two of the
three layers are gated delta layers, as in Qwen3.5. The policy is
deliberately imperfect: the solutions it imitates come from a teacher who works correctly but slips
once in most of them, at places that do not depend on the length of the problem. The correct answer
is therefore still the likeliest one, for short and long problems alike, yet samples at temperature
1 are often wrong, as group-relative RL needs.
"""

import argparse
import copy
import json
import random
import sys
import time
from pathlib import Path

import reasoning_gym
import torch
from reasoning_gym.utils import extract_answer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from bubblespec.data.prompts import reasoning_gym_rows


def _sums(weight: float, min_terms: int, max_terms: int) -> dict:
    """Return an entry of the mixture: sums of `min_terms` to `max_terms` one-digit numbers."""
    terms = {"min_terms": min_terms, "max_terms": max_terms, "min_digits": 1, "max_digits": 1}
    return {"name": "chain_sum", "weight": weight, "config": terms}


# A solution of n terms has about 6 n tokens, so lengths have a heavy tail: p99 near 9 medians.
MIXTURE = [_sums(0.72, 2, 5), _sums(0.18, 6, 12), _sums(0.08, 13, 23), _sums(0.02, 24, 50)]
# The supervised stage starts from the mixture's weights, since copying the right term is learned on
# short problems first, and moves over RAMP_POOLS pools to these, which bring the long problems
# within reach too.
FINAL_WEIGHTS = [0.25, 0.2, 0.3, 0.25]
RAMP_POOLS = 80

# Share of the teacher's solutions with one slip. The policy imitates most slips: 0.65 leaves it
# near 0.48 accuracy at temperature 1.
SLIP_RATE = 0.65
SUPERVISED_SEED = 1000  # first seed of supervised data; RL data uses seeds below HELD_OUT_SEED
HELD_OUT_SEED = 999
MAX_RESPONSE_TOKENS = 400

EOS, PAD = "<|endoftext|>", "<|pad|>"
WIDTH, LAYERS, HEADS, MLP_WIDTH, MAX_POSITIONS = 96, 3, 4, 320, 1024
HEAD = WIDTH // HEADS
BATCH_TOKENS = 3000  # padded tokens in one supervised step
POOL_ROWS = 1536  # problems drawn and sorted by length at a time
WARMUP_STEPS = 20
IGNORED = -100  # label of positions without a loss


def worked_solution(
    entry: dict, slips: random.Random | None = None, slip_rate: float = SLIP_RATE
) -> str:
    """Solve a chain sum with running sums: `4 - 1 = +03 - 7 = -04<answer>-4</answer>`.

    Sums carry a sign and two digits, so that every term takes six tokens and copied terms stand at
    even distances. With `slips`, a share `slip_rate` of the solutions gets one wrong number: in the
    first sum, in the last sum or in the final answer, whatever the number of terms.
    """
    parts = entry["metadata"]["expression"].split(" ")
    total, text, last = int(parts[0]), parts[0], len(parts) // 2
    slip_at, slip_by = None, 0
    if slips is not None and slips.random() < slip_rate:
        slip_at, slip_by = slips.choice([1, last, last + 1]), slips.choice([-2, -1, 1, 2])
    for step in range(1, last + 1):
        operator, term = parts[2 * step - 1], int(parts[2 * step])
        total += (term if operator == "+" else -term) + (slip_by if step == slip_at else 0)
        text += f" {operator} {term} = {total:+03d}"
    total += slip_by if slip_at == last + 1 else 0
    return f"{text}<answer>{total}</answer>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on a few problems, so that words and answer tags are one token.

    Digits are split off before merging and so stay single tokens. Nothing is added around a text.
    """
    pieces = Regex(r"</?answer>| ?[A-Za-z]+:?| ?[-+=] ?|\d|\s+|[^\sA-Za-z\d]")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[EOS, PAD],
        show_progress=False,
    )
    rows = reasoning_gym_rows(MIXTURE, 20, SUPERVISED_SEED)
    tokenizer.train_from_iterator(
        [row["prompt"] + worked_solution(row["entry"]) for row in rows], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, is_hybrid: bool = False) -> PreTrainedModel:
    """Make a Llama-style policy, or a hybrid one, from torch's current random state."""
    own: dict = {}
    if is_hybrid:
        own = {"layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"]}
        own |= {"linear_num_key_heads": HEADS, "linear_num_value_heads": HEADS}
        own |= {"linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD, "head_dim": HEAD}
    config = (Qwen3_5TextConfig if is_hybrid else LlamaConfig)(
        **own,
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=MLP_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_RESPONSE_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


@torch.no_grad()
def add_layers(model: PreTrainedModel, num_layers: int) -> None:
    """Make a policy deeper without changing what it computes: new layers add 0 to their input."""
    while len(layers := model.model.layers) < num_layers:
        layer = copy.deepcopy(layers[-1])
        layer.self_attn.layer_idx = len(layers)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        layers.append(layer)
    model.config.num_hidden_layers = len(layers)


def supervised_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int, pool: int = 0, slip_rate: float = SLIP_RATE
):
    """Yield `(input_ids, attention_mask, labels)`, each int64 [rows, tokens], without end.

    pool: number of the first pool of problems; from RAMP_POOLS on, long problems have their final
    weight. Rows of one batch have similar lengths. Padding is on the right; labels cover the
    solution and its EOS.
    """
    shuffle = random.Random(seed)
    while True:
        share = min(1.0, pool / RAMP_POOLS)
        tasks = [
            {**task, "weight": (1.0 - share) * task["weight"] + share * final}
            for task, final in zip(MIXTURE, FINAL_WEIGHTS, strict=True)
        ]
        # Two seeds share no pool before a thousand pools, far more than a run gets through.
        rows = reasoning_gym_rows(tasks, POOL_ROWS, SUPERVISED_SEED + 1000 * seed + pool)
        prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
        texts = [worked_solution(row["entry"], shuffle, slip_rate) + EOS for row in rows]
        pairs = list(zip(prompts, tokenizer(texts)["input_ids"], strict=True))
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        batches = []
        while pairs:
            longest = len(pairs[-1][0]) + len(pairs[-1][1])
            count = max(1, BATCH_TOKENS // longest)
            pairs, chosen = pairs[:-count], pairs[-count:]
            ids = torch.full((len(chosen), longest), tokenizer.pad_token_id)
            mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
            for row, (prompt, solution) in enumerate(chosen):
                end = len(prompt) + len(solution)
                ids[row, :end] = torch.tensor(prompt + solution)
                mask[row, :end] = 1
                labels[row, len(prompt) : end] = ids[row, len(prompt) : end]
            batches.append((ids, mask, labels))
        shuffle.shuffle(batches)
        yield from batches
        pool += 1


@torch.no_grad()
def sample_responses(
    model, tokenizer, prompts: list[str], *, greedy: bool = False, rows: int = 256
) -> list:
    """Sample a response to each prompt at temperature 1, or the likeliest tokens, in batches.

    Return the token ids of each response, with its EOS if it has one.
    """
    responses: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        inputs = tokenizer([prompts[index] for index in chosen], padding=True, return_tensors="pt")
        options = {}
        if greedy:
            options = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        prompt_tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        output = model.generate(input_ids=prompt_tokens, attention_mask=mask, **options)
        for index, ids in zip(chosen, output[:, prompt_tokens.shape[1] :].tolist(), strict=True):
            ended = tokenizer.eos_token_id in ids
            responses[index] = ids[: ids.index(tokenizer.eos_token_id) + 1] if ended else ids
    return responses


def is_correct(tokenizer: PreTrainedTokenizerFast, row: dict, response: list[int]) -> bool:
    """Whether reasoning-gym accepts the tagged answer of a finished response."""
    if response[-1:] != [tokenizer.eos_token_id]:
        return False
    answer = extract_answer(tokenizer.decode(response, skip_special_tokens=True))
    return reasoning_gym.get_score_answer_fn(row["task"])(answer, row["entry"]) >= 1.0


def accuracy(model, tokenizer, rows: list[dict], greedy: bool = False) -> float:
    """Return the share of rows with a correct response, one response a row."""
    responses = sample_responses(model, tokenizer, [row["prompt"] for row in rows], greedy=greedy)
    pairs = zip(rows, responses, strict=True)
    return sum(is_correct(tokenizer, row, ids) for row, ids in pairs) / len(rows)


def is_good_enough(model, tokenizer, target: float, rows: int = 256) -> tuple[bool, float]:
    """Whether accuracy reaches `target`, and half of it in every range of lengths."""
    overall = accuracy(model, tokenizer, reasoning_gym_rows(MIXTURE, rows, HELD_OUT_SEED))
    if overall < target:
        return False, overall
    ranges = [reasoning_gym_rows([task], rows // 4, HELD_OUT_SEED) for task in MIXTURE]
    return all(accuracy(model, tokenizer, one_range) >= target / 2 for one_range in ranges), overall


def train(model, tokenizer, options: argparse.Namespace) -> list[float]:
    """Train until the policy is good enough or a limit is met; return every loss (nats)."""
    rate, seconds, max_steps = options.learning_rate, options.seconds, options.max_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    first_pool = RAMP_POOLS if options.start else 0
    batches = supervised_batches(tokenizer, options.seed, first_pool, options.slip_rate)
    losses: list[float] = []
    check_every, held_out = 400, float("nan")
    begin = time.monotonic()
    with tqdm(total=max_steps, desc="supervised", unit="step") as progress:
        while len(losses) < max_steps:
            done = max(len(losses) / max_steps, (time.monotonic() - begin) / seconds)
            if done >= 1.0:
                break
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (len(losses) + 1) / WARMUP_STEPS) * (1.0 - 0.9 * done)
            ids, mask, labels = next(batches)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.3f}", held_out=f"{held_out:.2f}")
            if len(losses) % check_every == 0:
                good, held_out = is_good_enough(model, tokenizer, options.stop_accuracy)
                if good:
                    break
    return losses


def measure_quality(model, tokenizer, rows: int, group: int = 8) -> dict:
    """Measure held-out accuracies, spread within groups of samples, and lengths in tokens."""
    held_out = reasoning_gym_rows(MIXTURE, rows, HELD_OUT_SEED)
    repeated = [row for row in held_out for _ in range(group)]
    responses = sample_responses(model, tokenizer, [row["prompt"] for row in repeated])
    pairs = zip(repeated, responses, strict=True)
    correct = [is_correct(tokenizer, row, ids) for row, ids in pairs]
    wins = torch.tensor(correct, dtype=torch.float32).view(rows, group).sum(1)
    lengths = torch.tensor([len(ids) for ids in responses], dtype=torch.float32)
    finished = sum(ids[-1] == tokenizer.eos_token_id for ids in responses)
    by_range = {}
    for task in MIXTURE:
        name = f"{task['config']['min_terms']}-{task['config']['max_terms']} terms"
        rows_of_range = reasoning_gym_rows([task], rows // 2, HELD_OUT_SEED)
        by_range[name] = accuracy(model, tokenizer, rows_of_range)
    return {
        "accuracy_temperature_1": wins.mean().item() / group,
        "accuracy_greedy": accuracy(model, tokenizer, held_out, greedy=True),
        "accuracy_by_range": by_range,
        "mixed_groups": ((wins > 0) & (wins < group)).float().mean().item(),
        "group_size": group,
        "problems": rows,
        "response_tokens": {
            "median": lengths.median().item(),
            "p99": lengths.quantile(0.99).item(),
            "max": lengths.max().item(),
        },
        "truncated": 1.0 - finished / len(responses),
    }


def earlier_stages(folder: Path | None) -> list[dict]:
    """Return the earlier runs that led to the weights in `folder`, from its quality.json."""
    return json.loads((folder / "quality.json").read_text())["stages"] if folder else []


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; a bad value ends the program with one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--start", type=Path, help="folder of an earlier run to continue from")
    for option, default, meaning in (
        ("--seconds", 1200.0, "longest training time"),
        ("--max-steps", 6000, "most supervised steps"),
        ("--seed", 0, "seed of weights and supervised data"),
        ("--stop-accuracy", 0.40, "held-out accuracy to stop at"),
        ("--problems", 512, "held-out problems measured at the end"),
        ("--learning-rate", 3e-3, "learning rate at its peak"),
        ("--slip-rate", SLIP_RATE, "share of solutions with a slip"),
        ("--layers", LAYERS, "decoder layers, with --start at least those of the earlier run"),
    ):
        parser.add_argument(option, type=type(default), default=default, help=meaning)
    parser.add_argument("--hybrid", action="store_true", help="two of three layers have a state")
    options = parser.parse_args(arguments)
    if options.hybrid and options.layers != LAYERS:
        sys.exit(f"error: --hybrid has {LAYERS} --layers")
    if options.seconds <= 0 or options.max_steps < 1 or options.seed < 0 or options.problems < 2:
        limits = "--seconds, --max-steps must be positive, --seed at least 0, --problems at least 2"
        sys.exit(f"error: {limits}")
    if not 0.0 < options.stop_accuracy <= 1.0:
        sys.exit("error: --stop-accuracy must be above 0 and at most 1")
    if not 0.0 <= options.slip_rate <= 1.0 or options.layers < LAYERS:
        sys.exit(f"error: --slip-rate must be 0 to 1, and --layers at least {LAYERS}")
    if options.learning_rate <= 0:
        sys.exit("error: --learning-rate must be positive")
    if options.start and not (options.start / "quality.json").is_file():
        why = "is no folder of an earlier run: it has no quality.json"
        sys.exit(f"error: --start {options.start} {why}")
    if options.output.exists() and not options.output.is_dir():
        sys.exit(f"error: --output {options.output} is not a folder")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Train, save and measure the tiny policy."""
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    if options.start:  # ties between pairs may fall differently in another training of a tokenizer
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.start)
        model = AutoModelForCausalLM.from_pretrained(options.start)
    else:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, options.hybrid)
    add_layers(model, options.layers)
    begin = time.monotonic()
    losses = train(model, tokenizer, options)
    seconds = time.monotonic() - begin
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    quality = measure_quality(model, tokenizer, options.problems)
    quality["parameters"] = sum(weight.numel() for weight in model.parameters())
    this_stage = {
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "slip_rate": options.slip_rate,
        "steps": len(losses),
        "seconds": round(seconds, 1),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    quality["stages"] = [*earlier_stages(options.start), this_stage]
    (options.output / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")
    print(json.dumps(quality, indent=2))


if __name__ == "__main__":
    main()
