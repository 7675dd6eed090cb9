"""The engine without speculation against transformers: python benchmarks/generate.py [--model
tiny|smollm2|FOLDER] [--json OUT]

32 rows (8 prompts, 4 samples each) at temperature 1, on one thread, by the engine, `model.generate`
(one batch padded on the left, K/V cache, SDPA) and transformers' continuous batching, which is what
`model.generate_batch` runs. Each samples other tokens, so lengths are prescribed: row by row the
same for all, none stops at an end token. The tail is that of a lognormal law; the same rows with
equal lengths show what is left without one. `generate` has a limit for all rows only; a stopping
criterion ends each at its own length, and, as ever, an ended row is padded until the last row ends.
Only prescribed tokens count.

With --natural rows end at the model's own end token instead; then lengths differ between the arms,
by chance alone.

Each arm has a copy of the model, is run once before it counts, and runs in turn with the others.
Starting and stopping the thread of the continuous batching is not timed.
"""

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from bubblespec.data.prompts import build_prompt_set, make_tokenize, reasoning_gym_rows
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.types import Row, SampleId

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODELS = {
    "tiny": os.path.join(ROOT, "configs/tiny_policy"),
    "smollm2": os.path.join(ROOT, "models/smollm2-135m-instruct"),
}
LONGEST = {"tiny": 400, "smollm2": 96}  # response tokens, if not given
TASKS = [
    {
        "name": "chain_sum",
        "weight": 1.0,
        "config": {"min_terms": 2, "max_terms": 12, "min_digits": 1, "max_digits": 1},
    }
]
SIGMA = (
    0.93  # the 99th percentile is 8.7 times the median, as it is with configs/tiny_cpu_bulk.yaml
)
PAGE = 64  # positions a page of the paged cache

Arm = Callable[[], list[int]]  # generates all rows; returns the response tokens of each


def tail_lengths(count: int, longest: int, seed: int) -> np.ndarray:
    """Response lengths int64 [count]: evenly spaced quantiles of a lognormal law up to `longest`,
    in random order."""
    quantile = [statistics.NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    lengths = np.exp(SIGMA * (np.array(quantile) - quantile[-1])) * longest
    return np.random.default_rng(seed).permutation(np.maximum(lengths.round(), 1).astype(np.int64))


def load_prompts(tokenizer, num_prompts: int, num_generations: int) -> list[tuple[int, ...]]:
    """Token ids of each row: chain sums, as chat messages where the tokenizer has a template."""
    rows = reasoning_gym_rows(TASKS, num_prompts, seed=0)
    prompts = build_prompt_set(
        rows, make_tokenize(tokenizer), 1 << 16, as_chat=tokenizer.chat_template is not None
    ).prompts
    return [prompt.token_ids for prompt in prompts for _ in range(num_generations)]


def engine_arm(
    model: PreTrainedModel, prompts: list, lengths: np.ndarray, stop: tuple[int, ...]
) -> Arm:
    longest = max(len(prompt) for prompt in prompts) + int(lengths.max())
    prepare_model(model, longest)
    engine = Engine(ModelRunner(model, len(prompts), longest, seed=0))
    params = SamplingParams(stop_token_ids=stop)
    visit = 0

    def run() -> list[int]:
        nonlocal visit
        visit += 1  # other noise
        engine.reset()
        rows = [
            Row(SampleId(hash(p) >> 1, visit, j), p, int(n))
            for j, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return [len(row.tokens) for row in engine.run(rows, params)]

    return run


class EndsAt(StoppingCriteria):
    """Ends row r when the batch has `lengths[r]` tokens, prompt and padding included. lengths:
    int64 [rows]."""

    def __init__(self, lengths: torch.Tensor):
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


def generation_config(longest: int, stop: tuple[int, ...], pad: int) -> GenerationConfig:
    """Plain sampling at temperature 1; without end tokens none is ever looked for."""
    return GenerationConfig(
        max_new_tokens=longest,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=list(stop) or None,
        pad_token_id=pad,
    )


def generate_arm(
    model: PreTrainedModel, prompts: list, lengths: np.ndarray, stop: tuple[int, ...], *, pad: int
) -> Arm:
    model.set_attn_implementation("sdpa")
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = generation_config(int(lengths.max()), stop, pad)
    model.generation_config = config
    criteria = StoppingCriteriaList([EndsAt(torch.from_numpy(lengths) + width)])

    def run() -> list[int]:
        out = model.generate(
            ids, attention_mask=mask, generation_config=config, stopping_criteria=criteria
        )[:, width:].numpy()
        assert out.shape[1] <= lengths.max()
        ended = np.isin(out, stop)
        first = np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, out.shape[1])
        return np.minimum(first, lengths).tolist()

    return run


def batch_arm(
    model: PreTrainedModel, prompts: list, lengths: np.ndarray, stop: tuple[int, ...], *, pad: int
) -> tuple[Arm, Callable]:
    """The arm, and what ends its thread. All rows fit into the cache and into one batch."""
    model.set_attn_implementation("sdpa")
    pages = sum(
        -(-(len(prompt) + int(n)) // PAGE) + 1 for prompt, n in zip(prompts, lengths, strict=True)
    )
    cache = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages + 1, max_batch_tokens=2048)
    config = generation_config(int(lengths.max()), stop, pad)
    config.eos_token_id = list(stop) or -1
    context = model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=cache
    )
    manager = context.__enter__()

    def run() -> list[int]:
        # What generate_batch does, which has one limit for all rows.
        numbers = [
            manager.add_request(list(p), max_new_tokens=int(n))
            for p, n in zip(prompts, lengths, strict=True)
        ]
        num_tokens = {}
        while len(num_tokens) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is not None:
                raise RuntimeError(f"continuous batching: {result.error}")
            if result is not None and result.is_finished():
                num_tokens[result.request_id] = len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("continuous batching: its thread has ended")
        return [num_tokens[number] for number in numbers]

    return run, lambda: context.__exit__(None, None, None)


def measure(arms: dict[str, Arm], repeats: int) -> dict[str, dict]:
    """Each arm once unmeasured, then `repeats` times in turn, forwards and backwards. Medians."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    tokens: dict[str, list[int]] = {name: [] for name in arms}
    per_row = {name: arm() for name, arm in arms.items()}
    for repeat in range(repeats):
        for name in list(arms) if repeat % 2 == 0 else list(arms)[::-1]:
            started = time.perf_counter()
            per_row[name] = arms[name]()
            seconds[name].append(time.perf_counter() - started)
            tokens[name].append(sum(per_row[name]))
    rate = {
        name: [n / s for n, s in zip(tokens[name], seconds[name], strict=True)] for name in arms
    }
    return {
        name: {
            "seconds": seconds[name],
            "tokens": tokens[name],
            "row_tokens": per_row[name],
            "tokens_per_second": statistics.median(rate[name]),
            # paired: within a turn the machine is the same for all
            "engine_speedup": statistics.median(
                e / r for e, r in zip(rate["engine"], rate[name], strict=True)
            ),
        }
        for name in arms
    }


def run_workload(
    model: PreTrainedModel,
    prompts: list,
    lengths: np.ndarray,
    stop: tuple[int, ...],
    *,
    pad: int,
    repeats: int,
) -> dict:
    """Figures of all arms; an arm that cannot run at all has its error in place of figures."""
    arms = {
        "engine": engine_arm(copy.deepcopy(model), prompts, lengths, stop),
        "generate": generate_arm(copy.deepcopy(model), prompts, lengths, stop, pad=pad),
    }
    close, error = None, None
    try:
        arms["generate_batch"], close = batch_arm(
            copy.deepcopy(model), prompts, lengths, stop, pad=pad
        )
        arms["generate_batch"]()
    except (
        Exception
    ) as failure:  # a peer's failure is a result too, and the others' figures stand without it
        error = f"{type(failure).__name__}: {failure}"
        arms.pop("generate_batch", None)
    try:
        result = measure(arms, repeats)
    finally:
        if close is not None:
            close()
    if error is not None:
        result["generate_batch"] = {"error": error}
    for name, figures in result.items():
        if not stop and "row_tokens" in figures and figures["row_tokens"] != lengths.tolist():
            raise AssertionError(f"{name} generated other lengths than prescribed")
    return result


def commit() -> str:
    """Of the sources, with a + where they differ from it."""
    got = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
    )
    return got.stdout.strip() or "unknown"


def print_table(workloads: dict[str, dict]) -> None:
    print("| lengths | arm | tokens | seconds | tokens/s | engine against it |")
    print("|---|---|---|---|---|---|")
    for workload, result in workloads.items():
        for name, r in result.items():
            if "error" in r:
                print(f"| {workload} | {name} | does not run: {r['error']} | | | |")
                continue
            print(
                f"| {workload} | {name} | {statistics.median(r['tokens']):.0f} | {statistics.median(r['seconds']):.2f} "
                f"| {r['tokens_per_second']:.0f} | {r['engine_speedup']:.2f}x |"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, or a Hugging Face folder")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument(
        "--longest", type=int, help="tokens of the longest response (tiny: 400, smollm2: 96)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--natural", action="store_true", help="rows end at the model's own end token"
    )
    parser.add_argument("--json", help="write the figures there")
    arguments = parser.parse_args()
    folder = MODELS.get(arguments.model, arguments.model)
    if not os.path.isdir(folder):
        print(
            f"error: --model: no folder {folder}; `make smollm2` makes that of smollm2",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = model.generation_config.eos_token_id
    ends = tuple(
        sorted({tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])} - {None})
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    prompts = load_prompts(tokenizer, arguments.num_prompts, arguments.num_generations)
    longest = arguments.longest or LONGEST.get(arguments.model, 96)
    tail = tail_lengths(len(prompts), longest, seed=0)
    if arguments.natural:
        lengths = {"natural": np.full(len(prompts), longest)}
    else:
        lengths = {"tail": tail, "equal": np.full(len(prompts), round(tail.mean()))}
    print(
        f"{arguments.model}, {len(prompts)} rows of {arguments.num_prompts} prompts, 1 thread, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, commit {commit()}, medians of {arguments.repeats} turns"
    )
    if not arguments.natural:
        print(
            f"tail: median {np.median(tail):.0f}, mean {tail.mean():.0f}, longest {tail.max()} tokens"
        )
    workloads = {
        name: run_workload(
            model,
            prompts,
            limits,
            ends if arguments.natural else (),
            pad=pad,
            repeats=arguments.repeats,
        )
        for name, limits in lengths.items()
    }
    print_table(workloads)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "model": arguments.model,
                    "commit": commit(),
                    "longest": longest,
                    "workloads": workloads,
                },
                file,
                indent=1,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
