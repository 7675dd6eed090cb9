"""Train a language model with synchronous RL: torchrun --nproc_per_node=8 train.py --config FILE [section.key=value ...]"""

import argparse
import logging
import os
import sys
import time

import numpy as np
import transformers

from bubblespec.advantages import estimate_advantages
from bubblespec.collect import collect
from bubblespec.config import load_config
from bubblespec.distributed import ranks_from_environment, say_once, signals_stop
from bubblespec.errors import EndsRun
from bubblespec.metrics import MetricsLogger
from bubblespec.report import peak_memory_gb, rollout_metrics, timing_metrics
from bubblespec.schedule.speculation import speculation_metrics
from bubblespec.set_up import set_up
from bubblespec.timeline import gather_lanes
from bubblespec.trace import Recorder
from bubblespec.trainer import Trainer, evaluate_if_due, save, stops_cleanly, train_step


def train(trainer: Trainer) -> None:
    config, ranks = trainer.config, trainer.ranks
    run = config.run
    logger = MetricsLogger(run.output_dir, ranks.is_main, trainer.num_updates, run.max_steps)
    if config.trace.enabled:
        store = trainer.speculation.store if trainer.speculation is not None else None
        trainer.recorder = Recorder(config, ranks, store, trainer.num_updates)
    with stops_cleanly(trainer, logger):
        evaluate_if_due(trainer, logger)
        for step in range(trainer.num_updates, run.max_steps):
            if step in run.timeline_steps or step - 1 in run.timeline_steps:
                ranks.barrier()  # lanes begin together, and what drawing took is not counted as waiting in the step after it
            if trainer.recorder is not None:
                trainer.recorder.begin(step, trainer.batch(step), config.rollout.num_generations)
            collected = collect(trainer, step)
            samples, rewards, stats, stages = collected.samples, collected.rewards, collected.stats, collected.stages
            advantages = estimate_advantages(rewards, config.loss.advantage_estimator, config.loss.scale_rewards).ravel()
            metrics, spans = train_step(trainer, samples, advantages, step)
            stats.events += spans
            stages.append(("train", stages[-1][2], time.perf_counter()))
            metrics |= rollout_metrics(collected, list(trainer.rewards)) | trainer.scorer.take_metrics()
            if trainer.speculation is not None:
                generated, all_rewards = collected.generated, collected.all_rewards.ravel()
                trainer.speculation.learn(step, generated.prompts, generated.tokens, all_rewards)
                metrics |= speculation_metrics(ranks, stats, trainer.speculation, int(generated.lengths.sum()))
            else:
                metrics["rollout/forwards"] = int(ranks.gather(np.array([stats.own_forwards])).max())
            metrics |= timing_metrics(ranks, stages, stats.wait_s, metrics.pop("timing_s/sync"), collected.generated)
            logger.log(step, metrics | {"perf/max_memory_gb": peak_memory_gb(ranks)})
            if trainer.recorder is not None:
                trainer.recorder.write(step, collected, metrics["rollout/digest"])
            if step % run.logging_steps == 0:
                logger.log_samples(step, samples, rewards.ravel(), trainer.tokenizer)
            if step in run.timeline_steps:
                logger.log_timeline(step, gather_lanes(ranks, stats.events, stages), config.speculative.method)
            evaluate_if_due(trainer, logger)
            is_last = step + 1 == run.max_steps
            if is_last or (run.save_steps and (step + 1) % run.save_steps == 0):
                save(trainer, is_last)


def main() -> int:
    parser = argparse.ArgumentParser(description="Synchronous RL for language models")
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    sys.path.append(os.getcwd())  # where the user's own reward functions are
    transformers.utils.logging.disable_progress_bar()
    if os.environ.get("RANK", "0") != "0":
        logging.disable(logging.WARNING)
    try:
        config = load_config(arguments.config, arguments.overrides)
        with ranks_from_environment(config.model.device, config.run.timeout_s) as ranks, signals_stop(ranks):
            train(set_up(config, ranks))
    except EndsRun as error:  # one line; anything else keeps its traceback
        say_once(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
