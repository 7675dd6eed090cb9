"""A run that is killed again and again ends as one that is not: python tests/system/faults.py
[--kills N] [--steps N] [--ranks N] [--seed S] [--json OUT] [overrides]

Runs of train.py in float64 with real learning, which save after every step: one without
disturbance, and one that is killed at random moments spread over its steps and started again each
time. Both must log the same `rollout/digest` at every step and end with the same weights to the
bit; the exit code is 1 if they do not.

rank        SIGKILL to one rank, chosen at random; the launcher ends the others
ranks       SIGKILL to all ranks at once
launcher    SIGKILL to torchrun alone
save        one of these three, while a checkpoint is being written
start       one of these three, before the first step
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from bubblespec.dist.processes import children_of
from tests.helpers.checks import is_alive
from tests.system.exactness import (
    ROOT,
    RUN_TIMEOUT_S,
    SHORT,
    environment,
    first_difference,
    launch,
    read_metrics,
    read_weights,
    run,
    same_weights,
)

VICTIMS = ("rank", "ranks", "launcher")
KINDS = (*VICTIMS, "save", "start")


class Run:
    """train.py under torchrun, in a session of its own. `said`: what it has written to stderr,
    after `end`."""

    def __init__(self, command: list[str], folder: str):
        self.folder = folder
        self.metrics_before = self._metrics_file()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `end`)
        self.launcher = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        self.said = ""
        self.pids: set[int] = set()  # of all ranks seen

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that are alive."""
        pids = {}
        for pid in children_of(self.launcher.pid):
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    values = dict(
                        entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry
                    )
            except OSError:  # it has just ended
                continue
            if b"RANK" in values:
                pids[int(values[b"RANK"])] = pid
        self.pids |= set(pids.values())
        return pids

    def wait_until(self, what: str, holds) -> None:
        """Raises RuntimeError if the run ends before."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not holds():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not get to {what}:\n{self.end()[1][-3000:]}")
            time.sleep(0.002)

    def wait_for_steps(self, count: int) -> None:
        """Until this run itself has logged a step, and there are `count` steps or more."""
        self.wait_until(
            "its first step", lambda: self._metrics_file() not in (None, self.metrics_before)
        )
        first = len(read_metrics(self.folder))
        self.wait_until(
            f"step {count}", lambda: len(read_metrics(self.folder)) >= max(count, first)
        )

    def is_saving(self) -> bool:
        return any(name.startswith("tmp-checkpoint-") for name in os.listdir(self.folder))

    def kill(self, victim: str, rng: random.Random) -> int | None:
        """SIGKILL to `victim`. Returns the rank if it was one."""
        ranks = self.ranks()
        if victim == "launcher":
            self.launcher.kill()
            return None
        chosen = [rng.choice(sorted(ranks))] if victim == "rank" and ranks else sorted(ranks)
        for rank in chosen:
            os.kill(ranks[rank], signal.SIGKILL)
        return chosen[0] if victim == "rank" and chosen else None

    def end(self) -> tuple[int, str]:
        """Wait until the launcher and all ranks have ended; exit code of the launcher, and what was
        said."""
        self.ranks()
        try:
            code = self.launcher.wait(RUN_TIMEOUT_S)
            deadline = time.monotonic() + 300
            while any(
                is_alive(pid) for pid in self.pids
            ):  # they die with their launcher, or find it dead once imported
                if time.monotonic() > deadline:
                    raise RuntimeError("a rank has outlived its launcher")
                time.sleep(0.01)
        finally:
            if self.launcher.poll() is None:
                os.killpg(self.launcher.pid, signal.SIGKILL)
                self.launcher.wait()
        if not self.log.closed:
            self.log.seek(0)
            self.said = self.log.read()
            self.log.close()
        return code, self.said

    def _metrics_file(self) -> int | None:
        """A run that goes on writes the file anew."""
        path = os.path.join(self.folder, "metrics.jsonl")
        return os.stat(path).st_ino if os.path.exists(path) else None


def live_and_die(
    command: list[str], folder: str, kind: str, steps: int, rng: random.Random
) -> dict:
    """Start or continue a run, and kill it at a random moment once `steps` steps are logged (or,
    `start`, before)."""
    process = Run(command, folder)
    victim = kind if kind in VICTIMS else rng.choice(VICTIMS)
    logged_before = len(read_metrics(folder))
    if kind == "start":
        process.wait_until("its ranks", process.ranks)
        time.sleep(rng.uniform(0, 8))
    else:
        process.wait_for_steps(steps)
        if kind == "save":
            process.wait_until("a save", process.is_saving)
            time.sleep(rng.uniform(0, 0.03))
        else:
            time.sleep(rng.uniform(0, 1.5))
    was_saving = (
        kind != "start" and process.is_saving()
    )  # before its start a run has not cleared away what the last has left
    rank = process.kill(victim, rng)
    code, said = process.end()
    record = {
        "kind": kind,
        "victim": victim,
        "rank": rank,
        "exit_code": code,
        "was_saving": was_saving,
    }
    record |= {"steps_before": logged_before, "steps_after": len(read_metrics(folder))}
    return record | {"is_named": rank is not None and f"rank {rank} missing in " in said}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="configs/tiny_cpu_bulk.yaml")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the moments; what a moment hits depends on the machine too",
    )
    parser.add_argument("--json")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    rng = random.Random(arguments.seed)
    folder = tempfile.mkdtemp(prefix="faults-")
    steps, options = (
        arguments.steps,
        ["--config", arguments.config, *SHORT, "run.keep_last=2", "run.save_steps=1"],
    )
    options += [f"run.max_steps={steps}", *arguments.overrides]
    whole, killed = os.path.join(folder, "whole"), os.path.join(folder, "killed")
    run(launch(arguments.ranks, "train.py", *options, f"run.output_dir={whole}"))
    command = launch(arguments.ranks, "train.py", *options, f"run.output_dir={killed}")
    kinds = [KINDS[i % len(KINDS)] for i in range(arguments.kills)]
    rng.shuffle(kinds)
    records = []
    for number, kind in enumerate(kinds):
        # Never at the very end: a run that has ended cannot be killed.
        target = min(int(steps * (number + rng.random()) / len(kinds)), steps - 2)
        record = live_and_die(command, killed, kind, target, rng)
        records.append(record)
        who = (
            record["victim"]
            if record["rank"] is None
            else f"rank {record['rank']}{', named' if record['is_named'] else ''}"
        )
        where = ", in a save" if record["was_saving"] else ""
        print(
            f"kill {number + 1:2} ({kind}): {who}{where}, at step {record['steps_after']}",
            flush=True,
        )
    run(command)
    step = first_difference(read_metrics(whole), read_metrics(killed))
    weights_equal = same_weights(read_weights(whole, steps), read_weights(killed, steps))
    summary = {"digests_equal": step is None, "weights_equal": weights_equal, "kills": len(records)}
    summary["in_a_save"] = sum(record["was_saving"] for record in records)
    print(f"{len(records)} kills, {summary['in_a_save']} of them in a save: ", end="")
    print("equal digests, " if step is None else f"other digests from step {step} on, ", end="")
    print("equal weights to the bit" if weights_equal else "other weights")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {
                    **summary,
                    "config": arguments.config,
                    "overrides": arguments.overrides,
                    "lives": records,
                },
                file,
                indent=1,
            )
    if step is None and weights_equal:
        shutil.rmtree(folder)
        return 0
    print(f"the runs are kept in {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
