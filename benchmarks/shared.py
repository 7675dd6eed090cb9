"""Shared parts of benchmarks: command line, runs, tables, prompts, and an engine without drafts."""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bubblespec.config import Config
from bubblespec.config.file import load_config
from bubblespec.data.prompts import build_prompt_set, make_tokenize, reasoning_gym_rows
from bubblespec.distributed.failures import report
from bubblespec.distributed.ranks import Ranks, ranks_from_environment
from bubblespec.engine.engine import Engine
from bubblespec.errors import EndsRun, InputError
from bubblespec.setup import build
from bubblespec.trainer import Trainer
from bubblespec.types import Prompt

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of --config, --json and overrides."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=as_written)
    parser.add_argument("--config", required=True)
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("overrides", nargs="*")
    return parser


def main(run: Callable[[argparse.Namespace, str], None], parser: argparse.ArgumentParser) -> int:
    """Run a benchmark with its arguments and a temporary folder; return the exit code."""
    arguments = parser.parse_intermixed_args()
    transformers.utils.logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(arguments, folder)
    except EndsRun as error:
        return report(error)
    return 0


def check_names(option: str, given: str, valid: dict) -> list[str]:
    """Return the names of an option, which are joined by commas. Raises InputError."""
    names = given.split(",")
    if unknown := ", ".join(sorted(set(names) - valid.keys())):
        raise InputError(f"{option}: {unknown} unknown; valid are {', '.join(valid)}")
    return names


def commit() -> str:
    """Return the commit of the sources, with a + where they differ from it."""
    command = ["git", "describe", "--always", "--dirty=+"]
    got = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return got.stdout.strip() or "unknown"


def run_config(arguments: argparse.Namespace, folder: str, *defaults: str) -> Config:
    """Return the configuration of a run in a folder. The command line overrides the defaults."""
    overrides = [f"run.output_dir={folder}", *defaults, *arguments.overrides]
    return load_config(arguments.config, overrides)


@contextmanager
def open_trainer(config: Config) -> Iterator[Trainer]:
    """Build a run on this rank."""
    with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
        yield build(config, ranks)


def log(line: str, ranks: Ranks) -> None:
    """Print a line at once, on rank 0."""
    if ranks.is_main:
        print(line, flush=True)


def write_json(path: str | None, result: dict) -> None:
    """Write a result, if there is a path."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


def write_result(arguments: argparse.Namespace, result: dict) -> None:
    """Write a result, with what was run, to --json."""
    given = {"config": arguments.config, "overrides": arguments.overrides, "commit": commit()}
    write_json(arguments.json, result | given)


def markdown(rows: list[dict[str, str]]) -> str:
    """Return a table with the keys of the first row as columns."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row.get(name, "") for name in names] for row in rows)]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tabulate(results: Iterable[dict], columns: dict[str, str]) -> str:
    """Return a table of results. columns: format strings of figures, by heading.

    A cell is a dash where a figure is missing or None. An error stands in the first such cell."""

    def cell(template: str, result: dict) -> str:
        try:
            return template.format_map(result)
        except (KeyError, TypeError):
            return "-"

    rows = []
    for result in results:
        row = {heading: cell(template, result) for heading, template in columns.items()}
        if "error" in result:
            first = next(heading for heading, text in row.items() if text == "-")
            row[first] = f"does not run: {result['error']}"
        rows.append(row)
    return markdown(rows)


def load_policy(folder: str) -> tuple[transformers.PreTrainedTokenizerBase, PreTrainedModel, tuple]:
    """Return the tokenizer, the float32 model and its end tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])} - {None}
    return tokenizer, model, tuple(sorted(ends))


def random_policy(folder: str, vocabulary: int) -> list[str]:
    """Return overrides for a model with random weights: all texts have a reward, and few end."""
    keys = [f"model.path={folder}", f"rollout.stop_token_ids=[{vocabulary - 1}]"]
    return [*keys, "reward.functions=[benchmarks.gpu_programs.share_of_odd]"]


def chain_sums(tokenizer, count: int, seed: int, max_terms: int) -> list[Prompt]:
    """Make prompts of sums, as chat messages where the tokenizer has a template."""
    config = {"min_terms": 2, "max_terms": max_terms, "min_digits": 1, "max_digits": 1}
    rows = reasoning_gym_rows([{"name": "chain_sum", "weight": 1.0, "config": config}], count, seed)
    is_chat = tokenizer.chat_template is not None
    return build_prompt_set(rows, make_tokenize(tokenizer), 1 << 16, as_chat=is_chat).prompts


def plain_engine(trainer: Trainer) -> Engine:
    """Make an engine without drafts, which the trainer's own holds from step to step.

    They have one runner, with its cache and graphs, so that both fit a GPU; a rollout of either
    begins with a reset."""
    return Engine(trainer.sampler.engine.runner)
