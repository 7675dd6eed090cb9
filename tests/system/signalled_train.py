"""train.py that gets a signal at an exact place: tests/system/signalled_train.py --at STEP --kind
KIND --config F [overrides]

In the update of a step, when the step before is logged:
ranks       SIGTERM to every rank
ranks-die   SIGKILL to every rank
In the save after the update of a step, when everything is written and nothing has its name yet:
save-dies   SIGKILL to rank 0, unless the launcher has restarted it
"""

import argparse
import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import train
from bubblespec import checkpoint
from bubblespec.trainer import Trainer

KINDS = ("ranks", "ranks-die", "save-dies")


def send(kind: str) -> None:
    if kind != "save-dies":
        os.kill(os.getpid(), signal.SIGTERM if kind == "ranks" else signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", type=int, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    arguments, rest = parser.parse_known_args()
    sys.argv = ["train.py", *rest]
    step, kind = arguments.at, arguments.kind
    update, rename = Trainer.update, os.rename

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

    Trainer.update, checkpoint.os.rename = signalled_update, deadly_rename
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
