"""How a step's cost grows with its work: python benchmarks/growth.py [--json OUT] [--figure PNG]

A random model of the tiny policy's shape generates rows of a prescribed length, once without and once with speculation, and is
trained on them: 8 to 128 rows of 256 tokens, and 16 rows of 128 to 2048 tokens. For the second rollout every row has a draft in
which one token of 32 is wrong, so drafts are verified, refused and matched again, and slots are left for drafts of coming steps.

Times are processor time of one thread, so other work on the machine disturbs them little, and every part excludes the parts
within it. `loop` is everything in the step but the model's forward and backward and the optimizer: admission, packing, masks,
sampling, drafts, windows, planning, ticks, exchange, histories, scoring, balancing, metrics. The growth of each part is
the slope of a straight line through log seconds over log rows, or log tokens: 1 is linear. Each size is a process of its own, for
the sake of its peak memory, which is given without what the process needs before it loads the model.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import torch
from tqdm import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

ROWS, LENGTHS = (8, 16, 32, 64, 128), (128, 256, 512, 1024, 2048)
FIXED_LENGTH, FIXED_ROWS = 256, 16
WRONG_EVERY = 32  # tokens of a draft
SHOWN = ("plain/forward", "plain/loop", "drafts/forward", "drafts/loop", "train/model", "train/loop", "memory")


class Clock:
    """Processor seconds by part. Parts nest, and time counts for the innermost alone."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._open = ["loop"]
        self._since = time.process_time()

    def _book(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap."""
        self._book()
        lap, self.seconds = self.seconds, {}
        return lap

    def watch(self, owner, name: str, part: str) -> None:
        """From now on the calls of `owner.name` count as `part`."""
        function = getattr(owner, name)

        def watched(*args, **kwargs):
            with self.part(part):
                return function(*args, **kwargs)

        setattr(owner, name, watched)


def watch_model(clock: Clock) -> None:
    """Forwards, backwards and updates count as `forward` and `model`; how a forward is packed, which it asks for itself, as
    `loop`."""
    import bubblespec.learn.learner as update
    from bubblespec.engine import packing, runner
    from bubblespec.learn.optimizer import Optimizer

    for layout in (packing.CachePacking, packing.SequencePacking):
        clock.watch(layout.__dict__["groups"], "func", "loop")
    clock.watch(packing.AttentionGroup, "mask", "loop")
    clock.watch(runner, "forward_hidden", "forward")
    clock.watch(update, "response_logprobs", "model")
    clock.watch(torch.Tensor, "backward", "model")
    clock.watch(Optimizer, "reduce", "model")
    clock.watch(Optimizer, "step", "model")


def save_model(folder: str, max_length: int) -> None:
    """Random weights in the tiny policy's shape, with positions enough, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = os.path.join(ROOT, "configs", "tiny_policy")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(os.path.join(source, name), folder)
    config = AutoConfig.from_pretrained(source)
    config.max_position_embeddings = max_length
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def spoiled(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """A draft of `tokens` with every WRONG_EVERY-th token wrong."""
    draft = tokens.astype(np.int32)
    draft[WRONG_EVERY - 1 :: WRONG_EVERY] = (draft[WRONG_EVERY - 1 :: WRONG_EVERY] + 1) % vocab_size
    return draft


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_rows: int, length: int, more: list[str] = ()) -> dict[str, float]:
    """One step of `num_rows` rows of `length` tokens: seconds of each part, and bytes under `memory`. more: overrides."""
    from bubblespec.rollout.collect import collect

    from bubblespec.config import load_config
    from bubblespec.idle.speculation import speculation_metrics
    from bubblespec.ranks.collectives import ranks_from_environment
    from bubblespec.records import Draft
    from bubblespec.rollout.placement import make_rows
    from bubblespec.set_up import set_up
    from bubblespec.trainer import train_step

    torch.set_num_threads(1)
    num_generations = min(4, num_rows)
    overrides = [f"rollout.max_completion_length={length}", f"rollout.min_completion_length={length}"]
    overrides += [f"rollout.num_prompts_per_step={num_rows // num_generations}", f"rollout.num_generations={num_generations}"]
    overrides += [f"rollout.num_slots={2 * num_rows}", "bubble.lookahead=2", "speculative.method=bubble+suffix"]
    overrides += [f"optim.max_tokens_per_microbatch={max(4096, 160 + length)}", "eval.num_prompts=0", "run.eval_steps=0"]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, 160 + length)
        overrides += [f"model.path={folder}", f"run.output_dir={folder}/run", *more]
        config = load_config(os.path.join(ROOT, "configs/tiny_cpu.yaml"), overrides)
        with ranks_from_environment("cpu", 60.0) as ranks:
            before = peak_bytes()
            trainer = set_up(config, ranks)
            vocab_size = trainer.learner.model.config.vocab_size
            watch_model(clock)
            prompts = trainer.batch(0)
            rows = make_rows(trainer.own_share(prompts), 0, num_generations, length)
            clock.lap()
            trainer.engine.reset()
            trainer.engine.run(rows, trainer.sampling)
            plain = clock.lap()
            for row in rows:
                key = (row.id.visit, row.id.uid, row.id.sample)
                trainer.speculation.store.put(key, Draft(spoiled(row.tokens, vocab_size), True, 0))
            clock.lap()
            collected = collect(trainer, 0)
            drafts = clock.lap()
            advantages = np.random.default_rng(0).choice((-1.0, 1.0), num_rows)
            train_step(trainer, collected.samples, advantages, 0)
            train = clock.lap()
            trainer.speculation.learn(0, prompts, collected.samples.tokens, np.zeros(num_rows))
            metrics = speculation_metrics(ranks, collected.stats, trainer.speculation, num_rows * length)
            drafts["loop"] += clock.lap()["loop"]
            memory = peak_bytes() - before
    same = all(np.array_equal(a.tokens, b) for a, b in zip(rows, collected.samples.tokens, strict=True))
    assert all(len(tokens) == length for tokens in collected.samples.tokens)
    parts = {f"plain/{k}": v for k, v in plain.items()} | {f"drafts/{k}": v for k, v in drafts.items()}
    parts |= {f"train/{k}": v for k, v in train.items()}
    return parts | {
        "memory": memory,
        "rows": num_rows,
        "length": length,
        "forwards": metrics["rollout/forwards"],
        "accept_length": metrics["rollout/spec_accept_length"],
        "same_tokens": bool(same),
    }


def in_own_process(num_rows: int, length: int) -> dict[str, float]:
    """Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "point.json")
        command = [sys.executable, os.path.abspath(__file__), "--point", str(num_rows), str(length), "--json", out]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def slope(sizes: list[int], costs: list[float]) -> float:
    """Of the straight line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(costs, 1e-9)), 1)[0])


def summarise(series: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    return {
        over: {part: slope([p[over] for p in points], [p[part] for p in points]) for part in SHOWN}
        for over, points in series.items()
    }


def print_table(series: dict[str, list[dict]], growth: dict[str, dict[str, float]]) -> None:
    for over, points in series.items():
        fixed = f"{FIXED_LENGTH} tokens each" if over == "rows" else f"{FIXED_ROWS} rows"
        print(f"\n| {over} ({fixed}) | {' | '.join(SHOWN[:-1])} | memory MB | tokens a row and forward |")
        print("|---" * (len(SHOWN) + 2) + "|")
        for p in points:
            seconds = " | ".join(f"{p[part]:.3f}" for part in SHOWN[:-1])
            print(f"| {p[over]} | {seconds} | {p['memory'] / 1e6:.0f} | {p['accept_length']:.2f} |")
        print(f"| **growth** | {' | '.join(f'{growth[over][part]:.2f}' for part in SHOWN)} | |")


def draw(series: dict[str, list[dict]], growth: dict[str, dict[str, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.8), sharey=True)
    colours = {part: f"C{i}" for i, part in enumerate(("plain", "drafts", "train"))}
    for axis, (over, points) in zip(axes, series.items(), strict=True):
        sizes = [p[over] for p in points]
        for part in SHOWN[:-1]:
            style = "--" if part.endswith("loop") else "-"
            label = f"{part} ({growth[over][part]:.2f})"
            axis.plot(
                sizes, [p[part] for p in points], style, marker="o", markersize=3, color=colours[part.split("/")[0]], label=label
            )
        linear = np.array(sizes) / sizes[0]
        axis.plot(sizes, points[0]["plain/loop"] * linear, ":", color="grey", label="linear")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel(f"rows of {FIXED_LENGTH} tokens" if over == "rows" else f"tokens of each of {FIXED_ROWS} rows")
        axis.legend(fontsize=7, title="part (growth)", title_fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("processor seconds a step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--figure", help="draw it there")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--point", type=int, nargs=2, help=argparse.SUPPRESS)  # this process measures one size
    arguments = parser.parse_args()
    if arguments.point:
        result = measure(*arguments.point)
    else:
        sizes = {"rows": [(n, FIXED_LENGTH) for n in arguments.rows], "length": [(FIXED_ROWS, n) for n in arguments.lengths]}
        series: dict[str, list[dict]] = {over: [] for over in sizes}
        with tqdm(total=sum(map(len, sizes.values())), unit="size") as bar:
            for over, points in sizes.items():
                for point in points:
                    series[over].append(in_own_process(*point))
                    bar.update()
        result = {"growth": summarise(series), "series": series}
        print_table(series, result["growth"])
        if arguments.figure:
            draw(series, result["growth"], arguments.figure)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
