"""The engine without speculation against transformers: python benchmarks/generate.py [--model
tiny|smollm2|FOLDER] [--json OUT]

32 rows (8 prompts, 4 samples each) at temperature 1, on one thread, by the engine, `model.generate`
(one batch padded on the left, K/V cache, SDPA) and transformers' continuous batching, which is what
`model.generate_batch` runs. Each samples other tokens, so lengths are prescribed for each row. The
tail is that of a lognormal distribution; the same rows with equal lengths show what is left without
one. `generate` pads a row that has ended until the last row ends. Only prescribed tokens count.

Each arm has a copy of the model, runs once before it counts, and runs in turn with the others.
"""

import argparse
import copy
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
import transformers
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from benchmarks import shared
from bubblespec.engine.batch import SamplingParams
from bubblespec.engine.engine import Engine
from bubblespec.engine.model_checks import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.errors import InputError
from bubblespec.types import Row, SampleId

MODELS = {
    "tiny": os.path.join(shared.ROOT, "configs/tiny_policy"),
    "smollm2": os.path.join(shared.ROOT, "models/smollm2-135m-instruct"),
}
LONGEST = {"tiny": 400, "smollm2": 96}  # response tokens, if not given
# The 99th percentile is 8.7 times the median, as it is with configs/tiny_cpu_bulk.yaml.
SIGMA = 0.93
PAGE = 64  # positions a page of the paged cache

Arm = Callable[[], list[int]]  # generates all rows; returns the response tokens of each


def tail_lengths(count: int, longest: int, seed: int) -> np.ndarray:
    """Return quantiles of a lognormal distribution up to `longest`, shuffled, int64 [count]."""
    quantile = [statistics.NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    lengths = np.exp(SIGMA * (np.array(quantile) - quantile[-1])) * longest
    return np.random.default_rng(seed).permutation(np.maximum(lengths.round(), 1).astype(np.int64))


def engine_arm(model: PreTrainedModel, prompts: list, lengths: np.ndarray) -> Arm:
    """Return the arm of this package's engine."""
    longest = max(len(prompt) for prompt in prompts) + int(lengths.max())
    prepare_model(model, longest)
    engine = Engine(ModelRunner(model, len(prompts), longest, seed=0))
    visits = itertools.count(1)  # other noise each time

    def run() -> list[int]:
        draw_index = next(visits)
        engine.reset()
        rows = [
            Row(SampleId(hash(p) >> 1, draw_index, j), p, int(n))
            for j, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return [len(row.tokens) for row in engine.run(rows, SamplingParams())]

    return run


class EndsAt(StoppingCriteria):
    """Ends each row at its length, prompt and padding included, int64 [rows]."""

    def __init__(self, lengths: torch.Tensor):
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths


def generation_config(longest: int, end: int | None, pad: int) -> GenerationConfig:
    """Return settings of sampling at temperature 1."""
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(max_new_tokens=longest, eos_token_id=end, pad_token_id=pad, **options)


def generate_arm(model: PreTrainedModel, prompts: list, lengths: np.ndarray, pad: int) -> Arm:
    """Return the arm of `model.generate`."""
    model.set_attn_implementation("sdpa")
    width = max(len(prompt) for prompt in prompts)
    gaps = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[pad] * gap + list(p) for gap, p in zip(gaps, prompts, strict=True)])
    mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
    model.generation_config = generation_config(int(lengths.max()), None, pad)
    criteria = StoppingCriteriaList([EndsAt(torch.from_numpy(lengths) + width)])

    def run() -> list[int]:
        out = model.generate(ids, attention_mask=mask, stopping_criteria=criteria)
        return np.minimum(out.shape[1] - width, lengths).tolist()

    return run


@contextmanager
def batch_arm(
    model: PreTrainedModel, prompts: list, lengths: np.ndarray, pad: int
) -> Iterator[Arm]:
    """Make the arm of `model.generate_batch`, with a cache and batches for all rows."""
    model.set_attn_implementation("sdpa")
    sizes = np.array([len(prompt) for prompt in prompts]) + lengths
    num_pages = int((-(-sizes // PAGE) + 1).sum()) + 1
    context = model.continuous_batching_context_manager(
        generation_config=generation_config(int(lengths.max()), -1, pad),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=num_pages, max_batch_tokens=2048
        ),
    )
    with context as manager:

        def run() -> list[int]:
            # as generate_batch does, which has one limit for all rows
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

        yield run


def measure(arms: dict[str, Arm], repeats: int) -> dict[str, dict]:
    """Run each arm once unmeasured, then `repeats` times in turn, forwards and backwards."""
    found = {name: {"seconds": [], "tokens": [], "row_tokens": arm()} for name, arm in arms.items()}
    for repeat in range(repeats):
        for name in list(arms)[:: -1 if repeat % 2 else 1]:
            started = time.perf_counter()
            rows = arms[name]()
            found[name]["seconds"].append(time.perf_counter() - started)
            found[name]["tokens"].append(sum(rows))
            found[name]["row_tokens"] = rows
    rates = {name: np.divide(arm["tokens"], arm["seconds"]) for name, arm in found.items()}
    for name, arm in found.items():
        arm |= {f"median_{key}": statistics.median(arm[key]) for key in ("tokens", "seconds")}
        arm["tokens_per_second"] = float(np.median(rates[name]))
        # Paired: within a turn the machine is the same for all.
        arm["engine_speedup"] = float(np.median(rates["engine"] / rates[name]))
    return found


def run_workload(
    model: PreTrainedModel, prompts: list, lengths: np.ndarray, pad: int, repeats: int
) -> dict:
    """Return the figures of all arms, or an arm's error where it cannot run at all."""
    arms = {
        "engine": engine_arm(copy.deepcopy(model), prompts, lengths),
        "generate": generate_arm(copy.deepcopy(model), prompts, lengths, pad),
    }
    failed = {}
    with ExitStack() as stack:
        try:
            arm = stack.enter_context(batch_arm(copy.deepcopy(model), prompts, lengths, pad))
            arm()
            arms["generate_batch"] = arm
        except Exception as error:  # the others' figures stand without it
            failed["generate_batch"] = {"error": f"{type(error).__name__}: {error}"}
        result = measure(arms, repeats)
    for name, figures in result.items():
        if figures["row_tokens"] != lengths.tolist():
            raise AssertionError(f"{name} generated other lengths than prescribed")
    return result | failed


COLUMNS = {
    "lengths": "{lengths}",
    "arm": "{arm}",
    "tokens": "{median_tokens:.0f}",
    "seconds": "{median_seconds:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "engine against it": "{engine_speedup:.2f}x",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, or a Hugging Face folder")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--longest", type=int, help="tokens (tiny: 400, smollm2: 96)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write the figures there")
    return parser


def run(arguments: argparse.Namespace, _: str) -> None:
    folder = MODELS.get(arguments.model, arguments.model)
    if not os.path.isdir(folder):
        raise InputError(f"--model: no folder {folder}; `make smollm2` makes that of smollm2")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    tokenizer, model, ends = shared.load_policy(folder)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]
    sums = shared.chain_sums(tokenizer, arguments.num_prompts, seed=0, max_terms=12)
    prompts = [p.token_ids for p in sums for _ in range(arguments.num_generations)]
    longest = arguments.longest or LONGEST.get(arguments.model, 96)
    tail = tail_lengths(len(prompts), longest, seed=0)
    lengths = {"tail": tail, "equal": np.full(len(prompts), round(tail.mean()))}
    commit = shared.commit()
    print(f"{arguments.model}, {len(prompts)} rows of {arguments.num_prompts} prompts, 1 thread")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, commit {commit}")
    mean = f"median {np.median(tail):.0f}, mean {tail.mean():.0f}"
    print(f"tail: {mean}, longest {tail.max()} tokens")
    workloads = {
        name: run_workload(model, prompts, limits, pad, arguments.repeats)
        for name, limits in lengths.items()
    }
    rows = [
        {"lengths": workload, "arm": name} | figures
        for workload, arms in workloads.items()
        for name, figures in arms.items()
    ]
    print(shared.tabulate(rows, COLUMNS))
    given = {"model": arguments.model, "commit": commit, "longest": longest}
    shared.write_json(arguments.json, given | {"workloads": workloads})


if __name__ == "__main__":
    sys.exit(shared.main(run, make_parser()))
