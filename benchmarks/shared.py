"""What the benchmarks of whole runs have in common: their command line, and an engine for the
rollouts without speculation."""

import argparse
import sys
import tempfile
from collections.abc import Callable

import transformers

from bubblespec.engine.engine import Engine
from bubblespec.engine.runner import ModelRunner
from bubblespec.errors import InputError
from bubblespec.trainer import Trainer


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
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check_arms(arguments: argparse.Namespace, arms: dict) -> None:
    """Raises InputError if --arms names one that there is not."""
    if unknown := set(arguments.arms.split(",")) - arms.keys():
        raise InputError(
            f"--arms: {', '.join(sorted(unknown))} unknown; valid are {', '.join(arms)}"
        )


def plain_engine(trainer: Trainer) -> Engine:
    """An engine of its own: the trainer's holds drafts from step to step."""
    engine, learner = trainer.sampler.engine, trainer.learner
    options = {"max_batch_tokens": engine.max_batch_tokens, "kernel": learner.kernel}
    return Engine(
        ModelRunner(
            learner.model, engine.num_slots, engine.max_length, trainer.config.run.seed, **options
        )
    )
