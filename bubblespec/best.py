"""The best checkpoint by an evaluation (run.save_best): checkpoint-best, a link that is never torn.

The link is replaced in one operation once the new checkpoint is complete, and its target is never
deleted. So a run that is killed at any time leaves the new best or the previous one.
"""

import contextlib
import os

from bubblespec.checkpoint import BEST, STATE_FILE, read_state, remove_checkpoint
from bubblespec.config import Config
from bubblespec.errors import InputError, log
from bubblespec.rollout.evaluate import numbers_of_samples
from bubblespec.telemetry.report import short_names


def check_save_best(config: Config, rewards: list[str]) -> None:
    """Raise InputError if run.save_best is no metric of evaluations. rewards: their names."""
    name, functions = config.run.save_best, config.eval.functions
    known = [f"eval/{own}" for own in short_names(functions)]
    known += ["eval/reward"] if rewards else []
    known += [f"eval/rewards/{reward}/mean" for reward in short_names(rewards)]
    if rewards or functions:
        known += [f"eval/pass@{k}" for k in numbers_of_samples(config.eval.num_generations)]
    if name is not None and name not in known:
        has = f"evaluations of this run have {', '.join(known)}" if known else "set eval.functions"
        raise InputError(f"run.save_best: {name} is not measured; {has}")


def link_best(output_dir: str, best: dict | None) -> None:
    """Let checkpoint-best lead to the checkpoint of `best` (see `read_state`), or to none.

    A failure is a warning."""
    link, temporary = os.path.join(output_dir, BEST), os.path.join(output_dir, f"tmp-{BEST}")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary if best else link)
        if best:
            os.symlink(f"checkpoint-{best['step']}", temporary)
            os.replace(temporary, link)
    except OSError as error:
        log(f"warning: {link} cannot be written: {error.strerror}")


def find_best(config: Config, state: dict) -> dict | None:
    """Return the best of a resumed run so far, and link it again; None if it is not there.

    state: see `read_state`. After damage, a run resumes from a checkpoint before its best one."""
    best, output_dir = state.get("best"), config.run.output_dir
    if config.run.save_best is None:
        return None
    _undo_copy(output_dir)
    if best is not None:
        folder = os.path.join(output_dir, f"checkpoint-{best['step']}")
        if best["metric"] != config.run.save_best or not os.path.isdir(folder):
            best = None
    link_best(output_dir, best)
    return best


def _undo_copy(output_dir: str) -> None:
    """Replace a checkpoint-best that is a folder, as in a copy that followed links (`cp -rL`).

    It becomes the checkpoint that it is a copy of, unless that is there, too."""
    link = os.path.join(output_dir, BEST)
    if os.path.islink(link) or not os.path.isdir(link):
        return
    if os.path.isfile(os.path.join(link, STATE_FILE)):
        folder = os.path.join(output_dir, f"checkpoint-{read_state(link)['step']}")
        if not os.path.exists(folder):
            os.rename(link, folder)
    remove_checkpoint(link)
