"""A run that is killed again and again ends as one that is not: python tests/system/faults.py
[--kills N] [--steps N] [--ranks N] [--seed S] [overrides]

Runs of train.py in float64 with real learning, which save after every step: one without
disturbance, and one that is killed at random moments spread over its steps and restarted each time.
Both must log the same `rollout/digest` at every step and end with the same weights to the bit; the
exit code is 1 if they do not.

rank        SIGKILL to one rank, chosen at random; the launcher ends the others
ranks       SIGKILL to all ranks at once
launcher    SIGKILL to torchrun alone
save        one of these three, while a checkpoint is being written
start       one of these three, before the first step
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.helpers.checks import is_alive
from tests.helpers.runs import EPOCHS, digests, same_weights, weights
from tests.helpers.warm import ROOT, SINGLE_THREADED

TIMEOUT_S = 1200
VICTIMS = ("rank", "ranks", "launcher")
KINDS = (*VICTIMS, "save", "start")


class Run:
    """A script under the real torchrun, in a session of its own. options: of the launcher."""

    def __init__(self, ranks: int, script: list[str], folder: str, *options: str):
        self.folder, self.metrics_before = folder, self._metrics_file(folder)
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `end`)
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *options]
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        self.launcher = subprocess.Popen(
            [sys.executable, *launcher, *rendezvous, "--local-addr=127.0.0.1", *script],
            cwd=ROOT,
            env={**os.environ, **SINGLE_THREADED},
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        self.pids: set[int] = set()  # of all ranks seen

    def ranks(self) -> list[int]:
        """Process ids of the ranks that are alive."""
        pids = []
        for pid in self._children():
            try:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if b"\0RANK=" in b"\0" + file.read():
                        pids.append(pid)
            except OSError:  # it has just ended
                continue
        self.pids.update(pids)
        return pids

    def _children(self) -> list[int]:
        """Process ids of the launcher's children."""
        try:
            return [child.pid for child in psutil.Process(self.launcher.pid).children()]
        except psutil.NoSuchProcess:
            return []

    def wait_until(self, what: str, holds) -> None:
        """Raises RuntimeError if the run ends before."""
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not get to {what}:\n{self.end()[1][-3000:]}")
            time.sleep(0.002)

    def wait_for_steps(self, count: int) -> None:
        """Until this run itself has logged a step, and there are `count` steps or more."""
        old = (None, self.metrics_before)
        self.wait_until("its first step", lambda: self._metrics_file(self.folder) not in old)
        self.wait_until(f"step {count}", lambda: len(digests(self.folder)) >= count)

    def is_saving(self) -> bool:
        return any(name.startswith("tmp-checkpoint-") for name in os.listdir(self.folder))

    def kill(self, victim: str, rng: random.Random) -> None:
        ranks = self.ranks()
        if victim == "launcher":
            self.launcher.kill()
        for pid in {"launcher": [], "rank": ranks and [rng.choice(ranks)]}.get(victim, ranks):
            os.kill(pid, signal.SIGKILL)

    def end(self) -> tuple[int, str]:
        """Wait until the launcher and all ranks have ended; exit code of the launcher, and what it
        and the ranks have written."""
        self.ranks()
        try:
            code = self.launcher.wait(TIMEOUT_S)
            deadline = time.monotonic() + 300
            while any(map(is_alive, self.pids)):  # ranks die with their launcher
                if time.monotonic() > deadline:
                    raise RuntimeError("a rank has outlived its launcher")
                time.sleep(0.01)
        finally:
            if self.launcher.poll() is None:
                os.killpg(self.launcher.pid, signal.SIGKILL)
                self.launcher.wait()
        self.log.seek(0)
        with self.log:
            return code, self.log.read()

    @staticmethod
    def _metrics_file(folder: str) -> int | None:
        """A run that goes on writes the file again."""
        path = os.path.join(folder, "metrics.jsonl")
        return os.stat(path).st_ino if os.path.exists(path) else None


def kill_once(run: Run, kind: str, steps: int, rng: random.Random) -> None:
    """Kill a run at a random moment once `steps` steps are logged (or, `start`, before)."""
    victim = kind if kind in VICTIMS else rng.choice(VICTIMS)
    if kind == "start":
        run.wait_until("its ranks", run.ranks)
        time.sleep(rng.uniform(0, 8))
    else:
        run.wait_for_steps(steps)
        if kind == "save":
            run.wait_until("a save", run.is_saving)
        time.sleep(rng.uniform(0, 0.03 if kind == "save" else 1.5))
    run.kill(victim, rng)
    run.end()
    print(f"{kind}: {victim} killed at step {len(digests(run.folder))}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_intermixed_args()
    rng, steps = random.Random(arguments.seed), arguments.steps
    folder = tempfile.mkdtemp(prefix="faults-")
    whole, killed = os.path.join(folder, "whole"), os.path.join(folder, "killed")

    def start(output_dir: str) -> Run:
        script = ["train.py", "--config", "configs/tiny_cpu_bulk.yaml", *EPOCHS, "run.save_steps=1"]
        script += [f"run.max_steps={steps}", "run.save_total_limit=2", *arguments.overrides]
        return Run(arguments.ranks, [*script, f"run.output_dir={output_dir}"], output_dir)

    def finish(output_dir: str) -> None:
        code, said = start(output_dir).end()
        if code:
            raise RuntimeError(said[-3000:])

    finish(whole)
    kinds = [KINDS[i % len(KINDS)] for i in range(arguments.kills)]
    rng.shuffle(kinds)
    for number, kind in enumerate(kinds):
        # Never at the very end: a run that has ended cannot be killed.
        target = min(int(steps * (number + rng.random()) / len(kinds)), steps - 2)
        kill_once(start(killed), kind, target, rng)
    finish(killed)
    are_equal = digests(whole) == digests(killed)
    are_equal &= same_weights(weights(whole, steps), weights(killed, steps))
    print("equal digests and weights" if are_equal else f"different, see {folder}")
    if are_equal:
        shutil.rmtree(folder)
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
