"""train.py that gets a signal at an exact place: tests/system/signalled_train.py --at STEP --kind
KIND --config F [overrides]

In the update of a step, when the step before is logged:
ranks       SIGTERM to every rank
ranks-die   SIGKILL to every rank
In the save after the update of a step, when everything is written and nothing has its name yet:
save-dies   SIGKILL to rank 0, unless the launcher has restarted it
When that checkpoint has its name, and is about to become checkpoint-best:
best-dies   SIGKILL to rank 0

--scores: eval/reward after each step, in place of what is measured.
"""

import argparse
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import train
from bubblespec import checkpoint
from bubblespec.trainer import Trainer

KINDS = ("ranks", "ranks-die", "save-dies", "best-dies")


def send(kind: str) -> None:
    if kind.startswith("ranks"):
        os.kill(os.getpid(), signal.SIGTERM if kind == "ranks" else signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=int, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--scores", type=float, nargs="+")
    arguments, rest = parser.parse_known_args()
    sys.argv = ["train.py", *rest]
    step, kind, scores = arguments.at, arguments.kind, arguments.scores
    update, rename, replace, evaluate = Trainer.update, os.rename, os.replace, Trainer.evaluate

    def signalled_update(trainer, record, advantages):
        if record.step == step:
            send(kind)
        return update(trainer, record, advantages)

    def deadly_rename(source, target) -> None:
        is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        is_due = kind == "save-dies" and os.path.basename(target) == f"checkpoint-{step + 1}"
        if is_due and not is_restarted:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    def deadly_replace(source, target) -> None:
        is_best = os.path.basename(target) == checkpoint.BEST
        if kind == "best-dies" and is_best and os.readlink(source) == f"checkpoint-{step + 1}":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    def scored_evaluate(trainer):
        evaluation = evaluate(trainer)
        evaluation.metrics["eval/reward"] = [0.0, *scores][trainer.num_updates]
        return evaluation

    Trainer.update, checkpoint.os.rename = signalled_update, deadly_rename
    checkpoint.os.replace = deadly_replace
    if scores:
        Trainer.evaluate = scored_evaluate
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
