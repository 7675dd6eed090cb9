"""Train a language model with synchronous RL: torchrun --nproc_per_node=8 train.py --config FILE
[section.key=value ...]"""

import os
import sys

import bubblespec

if __name__ == "__main__":
    bubblespec.own_folders_last()
    from bubblespec import progress
    from bubblespec.distributed.processes import end_early

    end_early()
    progress.begin("importing torch and transformers")  # which takes seconds

import argparse
import logging

import transformers

from bubblespec.config.file import load_config
from bubblespec.distributed.failures import report
from bubblespec.distributed.ranks import ranks_from_environment, signals_stop
from bubblespec.errors import EndsRun
from bubblespec.learn.advantages import estimate_advantages
from bubblespec.setup import build
from bubblespec.tools import parse
from bubblespec.trainer import Trainer


def train(trainer: Trainer) -> None:
    """Run the training loop from the current step to the last one."""
    loss = trainer.config.loss
    with trainer.open():
        trainer.warm_start()
        trainer.evaluate_if_due()
        for step in range(trainer.num_updates, trainer.config.run.max_steps):
            record = trainer.sample(step)
            advantages = estimate_advantages(
                record.rewards, loss.advantage_estimator, loss.scale_rewards, record.samples
            )
            metrics = trainer.update(record, advantages.ravel())
            trainer.report(record, metrics)
            trainer.evaluate_if_due()
            trainer.save_if_due()


def main() -> int:
    parser = argparse.ArgumentParser(description="Synchronous RL for language models")
    transformers.utils.logging.disable_progress_bar()
    if os.environ.get("RANK", "0") != "0":
        logging.disable(logging.WARNING)
    try:
        arguments = parse(parser, sys.argv[1:])
        config = load_config(arguments.config, arguments.overrides)
        with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks:
            trainer = build(config, ranks)  # signals end it at once: there is nothing to save yet
            with signals_stop(ranks):
                train(trainer)
    except EndsRun as error:  # one line; anything else keeps its traceback
        return report(error)
    return ranks.exit_code  # 0 if all steps are done


if __name__ == "__main__":
    sys.exit(main())
