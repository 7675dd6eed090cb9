"""train.py that gets a signal at an exact place: tests/system/signalled_train.py --at STEP --kind
KIND --config F [overrides]

In the update of a step, when the step before is logged:
launcher    SIGTERM to the launcher, and once that has reached the rank a second one
ranks       SIGTERM to every rank
rank-dies   SIGKILL to the last rank, unless the launcher has restarted it
ranks-die   SIGKILL to every rank
In the save after the update of a step, when everything is written and nothing has its name yet:
save-dies   SIGKILL to rank 0
"""

import argparse
import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import train
from bubblespec import checkpoint
from bubblespec.dist.ranks import Ranks
from bubblespec.trainer import Trainer

KINDS = ("launcher", "ranks", "rank-dies", "ranks-die", "save-dies")
PATIENCE_S = 120.0


def send(kind: str, ranks: Ranks) -> None:
    is_last = ranks.rank == ranks.world_size - 1
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if kind == "launcher" and ranks.rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while not ranks.must_stop and time.monotonic() < deadline:  # it must reach this rank first
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGTERM)
    elif kind == "ranks":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "ranks-die" or (kind == "rank-dies" and is_last and not is_restarted):
        os.kill(os.getpid(), signal.SIGKILL)


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
            send(kind, trainer.ranks)
        return update(trainer, record, advantages)

    def deadly_rename(source, target) -> None:
        if kind == "save-dies" and os.path.basename(target) == f"checkpoint-{step + 1}":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    Trainer.update, checkpoint.os.rename = signalled_update, deadly_rename
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
