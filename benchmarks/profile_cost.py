"""What forwards of a model take on a device: python benchmarks/profile_cost.py --model FOLDER
[--device cuda] [--json OUT]

Times the engine's forwards over a grid: decoding rows at several context lengths, all or half of
them with drafts of several lengths, and prompts fed in chunks, alone and beside decoding rows. Fits
`ForwardCost` and prints what was measured, what the fit says, and its error at places of the grid
that it has not seen. --json writes the cost, for simulated runs on this machine.

Tokens are random, so drafts are refused; a forward costs the same whatever they are. Each place of
the grid is run once before it counts. Host work between forwards, and finding proposals, is not in
these times; a recorded run (`trace.enabled`) has both.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from bubblespec.engine.attention import choose_kernel
from bubblespec.engine.engine import Engine
from bubblespec.engine.model import prepare_model
from bubblespec.engine.runner import ModelRunner
from bubblespec.engine.sampling import SamplingParams
from bubblespec.errors import InputError
from bubblespec.records import Load
from bubblespec.simulate.cost import ForwardCost, fit_cost
from bubblespec.telemetry.trace import describe_hardware
from bubblespec.types import Row, SampleId

NUM_CHUNKS = 2  # timed of each prompt: the second attends to the first


class RandomDrafts:
    """Proposes `length` random tokens for each of the first `num_rows` rows. A `Proposer`."""

    def __init__(self, num_rows: int, length: int, vocab_size: int):
        self.drafts = list(np.random.default_rng(1).integers(0, vocab_size, (num_rows, length)))

    def propose(self, rows, lengths, room, budget):
        return (self.drafts + [None] * len(rows))[: len(rows)]

    def observe(self, rows, tokens, num_draft, num_accepted):
        pass


class Profile:
    """Forwards of one engine, timed. Each measurement: what it was, and the loads and seconds of
    its forwards."""

    def __init__(self, engine: Engine, vocab_size: int, repeats: int):
        self.engine, self.vocab_size, self.repeats = engine, vocab_size, repeats
        self.rng = np.random.default_rng(0)
        self.num_prompts = 0

    def timed_step(
        self, drafts: RandomDrafts | None = None, max_prefill_tokens: int | None = None
    ) -> tuple[Load, float]:
        device = self.engine.runner.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        _, load = self.engine.step(SamplingParams(), drafts, max_prefill_tokens)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return load, time.perf_counter() - started

    def add(self, num_rows: int, length: int) -> None:
        """Rows of one random prompt, with all the room there is."""
        self.num_prompts += 1
        prompt = tuple(self.rng.integers(0, self.vocab_size, length).tolist())
        room = self.engine.max_length - length
        self.engine.add(
            [Row(SampleId(self.num_prompts, 0, sample), prompt, room) for sample in range(num_rows)]
        )

    def decode(
        self, num_rows: int, length: int, num_drafting: int, window: int
    ) -> list[tuple[Load, float]]:
        """Rows of `length` positions, the first `num_drafting` of them with drafts of `window`
        tokens."""
        self.start_decoding(num_rows, length)
        drafts = RandomDrafts(num_drafting, window, self.vocab_size) if window else None
        return [self.timed_step(drafts) for _ in range(1 + self.repeats)][1:]

    def prefill(self, num_rows: int, length: int, chunk: int) -> list[tuple[Load, float]]:
        """A prompt fed `chunk` tokens at a time, beside `num_rows` decoding rows."""
        forwards = []
        for repeat in range(1 + self.repeats):
            self.start_decoding(num_rows, length)
            self.add(1, NUM_CHUNKS * chunk + 1)
            timed = [self.timed_step(None, chunk) for _ in range(NUM_CHUNKS)]
            forwards += timed if repeat else []
        return forwards

    def start_decoding(self, num_rows: int, length: int) -> None:
        self.engine.reset()
        if num_rows:
            self.add(num_rows, length)
        while len(self.engine.decoding()) < num_rows:
            self.engine.step(SamplingParams())


def grid(
    rows: list[int], lengths: list[int], windows: list[int], chunks: list[int], *, most_tokens: int
) -> Iterator[tuple]:
    """Name and arguments of each measurement whose forwards have at most `most_tokens` tokens."""
    for num_rows in rows:
        for length in lengths:
            for window in windows:
                for drafting in sorted({num_rows, (num_rows + 1) // 2}) if window else [0]:
                    if num_rows + drafting * window <= most_tokens:
                        yield "decode", num_rows, length, drafting, window
    for chunk in chunks:
        for num_rows in [0, *rows]:
            if num_rows + chunk <= most_tokens:
                yield "prefill", num_rows, lengths[0], chunk


def measure(profile: Profile, places: list[tuple]) -> list[tuple[tuple, list[tuple[Load, float]]]]:
    """Forwards of each place of the grid."""
    name, *arguments = places[0]
    getattr(profile, name)(*arguments)  # memory, kernels and caches are made
    return [
        (place, getattr(profile, place[0])(*place[1:]))
        for place in tqdm(places, unit="place", dynamic_ncols=True)
    ]


def print_table(measured: list[tuple[tuple, list[tuple[Load, float]]]], cost: ForwardCost) -> None:
    print(
        "| rows | positions | tokens | drafting rows x tokens | prompt chunk | ms measured | ms fitted | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (name, num_rows, _, *rest), forwards in measured:
        seconds = np.median([seconds for _, seconds in forwards])
        fitted = np.median([cost.seconds(load) for load, _ in forwards])
        positions, tokens = (
            np.median([getattr(load, name) for load, _ in forwards])
            for name in ("positions", "tokens")
        )
        drafts, chunk = (f"{rest[0]} x {rest[1]}", "") if name == "decode" else ("", rest[0])
        print(
            f"| {num_rows} | {positions:.0f} | {tokens:.0f} | {drafts} | {chunk} | {1e3 * seconds:.2f} | {1e3 * fitted:.2f} "
            f"| {fitted / seconds:.2f} |"
        )


def load_model(path: str, dtype: str, device: torch.device) -> PreTrainedModel:
    if not os.path.isdir(path):
        raise InputError(f"--model: no folder {path}")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise InputError(f"--model: cannot load {path}: {str(error).splitlines()[0]}") from error
    return model.to(device).eval()


def run(arguments: argparse.Namespace) -> None:
    if arguments.json and os.path.exists(arguments.json):
        raise InputError(f"--json: {arguments.json} is there already; give another name")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device: cuda, but torch sees no GPU; use cpu or auto")
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    rows, lengths, windows, chunks = (
        arguments.rows,
        arguments.lengths,
        arguments.windows,
        arguments.chunks,
    )
    model = load_model(arguments.model, arguments.dtype, device)
    grown = (2 + arguments.repeats) * (1 + max(windows))
    max_length = max(max(lengths) + grown, NUM_CHUNKS * max(chunks) + 2)
    try:
        kernel = choose_kernel("auto", device, model.dtype, prepare_model(model, max_length))
    except ValueError as error:
        raise InputError(f"--model: {error}") from error
    most_tokens = max(arguments.max_tokens, max(rows))
    runner = ModelRunner(
        model, max(rows) + 1, max_length, seed=0, max_batch_tokens=most_tokens, kernel=kernel
    )
    profile = Profile(
        Engine(runner), model.get_input_embeddings().num_embeddings, arguments.repeats
    )
    hardware = describe_hardware(device)
    print(f"{arguments.model}, {arguments.dtype}, {kernel}; {hardware}")
    measured = measure(profile, list(grid(rows, lengths, windows, chunks, most_tokens=most_tokens)))
    forwards = [forward for _, timed in measured for forward in timed]
    loads = np.array([load for load, _ in forwards])
    seconds = np.array([seconds for _, seconds in forwards])
    groups = np.repeat(range(len(measured)), [len(timed) for _, timed in measured])
    source = f"{arguments.model}, {arguments.dtype}, on {hardware['gpu'] or hardware['cpu']}"
    cost, errors = fit_cost(loads, seconds, source, groups)
    print_table(measured, cost)
    median, p90 = np.median(errors), np.quantile(errors, 0.9)
    print(
        f"{len(forwards)} forwards; error at unseen places {median:.1%}, 90th percentile {p90:.1%}"
    )
    if arguments.json:
        cost.save(arguments.json)


def numbers(text: str) -> list[int]:
    """Of an option: whole numbers with commas between them, in order."""
    return sorted({int(part) for part in text.split(",")})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder of a causal language model"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--rows", type=numbers, default=[1, 2, 8, 32], help="rows that decode together"
    )
    parser.add_argument("--lengths", type=numbers, default=[32, 256], help="positions of each row")
    parser.add_argument(
        "--windows", type=numbers, default=[0, 1, 3, 7, 15], help="draft tokens of a row"
    )
    parser.add_argument(
        "--chunks", type=numbers, default=[8, 32, 128, 512], help="prompt tokens fed at once"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="most tokens of a forward")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed forwards at each place of the grid"
    )
    parser.add_argument("--json", help="write the fitted cost there")
    arguments = parser.parse_args()
    for name, least in (("rows", 1), ("lengths", 1), ("windows", 0), ("chunks", 1)):
        if getattr(arguments, name)[0] < least:
            parser.error(f"--{name}: at least {least}")
    if arguments.repeats < 1:
        parser.error("--repeats: at least 1")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    try:
        run(arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
