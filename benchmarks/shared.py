"""What benchmarks have in common: their command line, policies and prompts, and an engine for the
rollouts without speculation."""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bubblespec.data.prompts import build_prompt_set, make_tokenize, reasoning_gym_rows
from bubblespec.distributed.failures import report
from bubblespec.engine.compiled import reduction_for
from bubblespec.engine.engine import Engine
from bubblespec.engine.forward import ModelForward
from bubblespec.engine.pages import Pages
from bubblespec.engine.runner import ModelRunner
from bubblespec.errors import EndsRun, InputError
from bubblespec.trainer import Trainer
from bubblespec.types import Prompt

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def make_parser(description: str) -> argparse.ArgumentParser:
    """--config, --json and overrides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True)
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("overrides", nargs="*")
    return parser


def main(run: Callable[[argparse.Namespace, str], None], parser: argparse.ArgumentParser) -> int:
    """The exit code. run: is given the arguments and a folder for its training runs, of which
    nothing is kept."""
    arguments = parser.parse_intermixed_args()
    transformers.utils.logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(arguments, folder)
    except EndsRun as error:
        return report(error)
    return 0


def check_names(option: str, given: str, valid: dict) -> list[str]:
    """The names of an option, with commas between. Raises InputError for one that there is not."""
    names = given.split(",")
    if unknown := set(names) - valid.keys():
        raise InputError(
            f"{option}: {', '.join(sorted(unknown))} unknown; valid are {', '.join(valid)}"
        )
    return names


def commit() -> str:
    """Of the sources, with a + where they differ from it."""
    got = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True
    )
    return got.stdout.strip() or "unknown"


def write_json(path: str | None, result: dict) -> None:
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


def markdown(rows: list[dict[str, str]]) -> str:
    """A table whose columns are the keys of the first row; cells that another row lacks are
    empty."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([row.get(name, "") for name in names] for row in rows)]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def load_policy(folder: str) -> tuple[transformers.PreTrainedTokenizerBase, PreTrainedModel, tuple]:
    """Tokenizer, float32 model and end tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])} - {None}
    return tokenizer, model, tuple(sorted(ends))


def chain_sums(tokenizer, count: int, seed: int, max_terms: int) -> list[Prompt]:
    """As chat messages where the tokenizer has a template."""
    config = {"min_terms": 2, "max_terms": max_terms, "min_digits": 1, "max_digits": 1}
    rows = reasoning_gym_rows([{"name": "chain_sum", "weight": 1.0, "config": config}], count, seed)
    is_chat = tokenizer.chat_template is not None
    return build_prompt_set(rows, make_tokenize(tokenizer), 1 << 16, as_chat=is_chat).prompts


def plain_engine(trainer: Trainer) -> Engine:
    """An engine of its own: the trainer's holds drafts from step to step."""
    engine, learner = trainer.sampler.engine, trainer.learner
    slots, length, pages = engine.num_slots, engine.max_length, engine.pages
    if pages is not None:
        pages = Pages.for_rows(slots, length, pages.page_size, pages.num_pages)
    runner = ModelRunner(
        learner.model,
        slots,
        length,
        trainer.config.run.seed,
        forward=ModelForward(
            learner.model,
            learner.kernel,
            reduce=reduction_for(learner.model.device, enforce_eager=False),
        ),
        max_num_batched_tokens=engine.max_num_batched_tokens,
        pages=pages,
    )
    return Engine(runner)
