"""train.py that fails on rank 1 in its first step, where NCCL would leave all ranks waiting:
tests/system/failing_train.py --kind KIND --codes FOLDER --config F [overrides]

loss      an exception in the user's loss function; in its next collective rank 0 waits for ever, in
          the key-value store, as NCCL does until another rank has come to its first one
rollout   an exception between two forwards
ctrl-c    two Ctrl-C, at all ranks
terminal  two Ctrl-C at the launcher, which alone gets those of a terminal
hangs     rank 1 does not come out of the update; rank 0's time-out is short

destroy_process_group blocks for ever, and says that it was called. The exit code of every rank that
ends by itself is a file in FOLDER.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from typing import NoReturn

import psutil

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import torch.distributed as dist

import train
from bubblespec.distributed.ranks import SAME_CTRL_C_S, Ranks
from bubblespec.engine.engine import Engine
from bubblespec.trainer import Trainer

KINDS = ("loss", "rollout", "ctrl-c", "terminal", "hangs")
RANK = int(os.environ.get("RANK", 0))
IS_FAILING = threading.Event()  # the rollout or update that fails has begun
HAS_LOSS = threading.Event()  # and this rank has called the loss function in it


def block() -> NoReturn:
    while True:  # as in a call to CUDA: no signal handler ends it
        threading.Event().wait()


def destroy() -> None:
    print("destroy_process_group was called", file=sys.stderr, flush=True)
    block()


def press_ctrl_c(ranks: Ranks) -> NoReturn:
    """Twice, at the launcher: again when all ranks have had the first long enough."""
    store = dist.distributed_c10d._get_default_store()
    if RANK == 0:
        os.kill(os.getppid(), signal.SIGINT)
    while not ranks.must_stop:
        time.sleep(0.01)
    time.sleep(SAME_CTRL_C_S + 0.1)
    store.add("ready", 1)
    while store.add("ready", 0) < ranks.world_size:
        time.sleep(0.01)
    if RANK == 0:
        os.kill(os.getppid(), signal.SIGINT)
    while True:
        time.sleep(0.01)


def failing_loss(logprob, ratio, advantage):
    """A user's loss function with a mistake in it."""
    if IS_FAILING.is_set():
        HAS_LOSS.set()
        if RANK == 1:
            raise KeyError("a mistake in the loss")
    return -ratio * advantage


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--codes", required=True)
    arguments, rest = parser.parse_known_args()
    sys.argv, kind = ["train.py", *rest], arguments.kind
    sys.modules["tests.system.failing_train"] = sys.modules["__main__"]  # with the loss function
    sample, update, step = Trainer.sample, Trainer.update, Engine.step
    complete, leave = Ranks.complete, os._exit

    def leave_with(code: int) -> NoReturn:
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        with open(os.path.join(arguments.codes, str(RANK)), "w", encoding="utf-8") as file:
            json.dump([code, children], file)
        leave(code)

    def failing_sample(trainer, number):
        if number == 0 and kind in ("rollout", "ctrl-c"):
            IS_FAILING.set()
        if kind == "terminal":
            press_ctrl_c(trainer.ranks)
        return sample(trainer, number)

    def failing_step(engine, *given):
        if IS_FAILING.is_set() and kind == "rollout" and RANK == 1:
            raise KeyError("a mistake in the engine")
        if IS_FAILING.is_set() and kind == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(SAME_CTRL_C_S + 0.1)
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine, *given)

    def failing_update(trainer, record, advantages):
        if record.step == 0 and kind == "loss":
            IS_FAILING.set()
        if record.step == 0 and kind == "hangs":
            trainer.ranks.timeout_s = 1.0
            if RANK == 1:
                block()
        return update(trainer, record, advantages)

    def complete_never(ranks, start):
        if HAS_LOSS.is_set():
            dist.distributed_c10d._get_default_store().get("what never comes")
        complete(ranks, start)

    Trainer.sample, Trainer.update, Engine.step = failing_sample, failing_update, failing_step
    Ranks.complete, dist.destroy_process_group, os._exit = complete_never, destroy, leave_with
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
