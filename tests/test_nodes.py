"""More than one machine: two launchers that find each other over loopback, each with one rank,
against one with two ranks."""

import os
import socket
import subprocess
import sys

import numpy as np

from bubblespec.checkpoint import STATE_FILE
from bubblespec.setup import check_all_see
from tests.helpers.checks import refusal
from tests.helpers.runs import SHORT, digests, run, same_weights, steps_of, weights
from tests.helpers.warm import ROOT, SINGLE_THREADED

SHORTER = [*(o for o in SHORT if "_steps" not in o), "run.max_steps=2", "run.save_steps=0"]


def run_on_two_nodes(output_dir, *overrides: str) -> None:
    """Each launcher is started as on a machine of its own, with one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    script = ["train.py", "--config", "configs/tiny_cpu_bulk.yaml", *SHORTER, *overrides]
    command = [*launcher, "--local-addr=127.0.0.1", *script, f"run.output_dir={output_dir}"]
    options = {"cwd": ROOT, "env": {**os.environ, **SINGLE_THREADED}, "text": True}
    options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    nodes = [subprocess.Popen([sys.executable, *command], **options) for _ in range(2)]
    try:
        said = [node.communicate(timeout=300)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert all(node.returncode == 0 for node in nodes), "\n".join(text[-3000:] for text in said)


def test_two_nodes_give_the_bits_of_one(tmp_path):
    """And whatever else only saves memory changes nothing: sharded state, slots chosen by free
    memory, a cache that is freed."""
    run(tmp_path / "one", 2, short=SHORTER)
    saving = ("rollout.num_slots=auto", "rollout.free_cache_engine=true")
    run_on_two_nodes(tmp_path / "two", "optim.shard_state=true", *saving)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")
    assert len(digests(tmp_path / "one")) == 2
    assert same_weights(weights(tmp_path / "two", 2), weights(tmp_path / "one", 2))
    assert all("timing_s/gen/rank_1" in line for line in steps_of(tmp_path / "two"))


class TwoRanks:
    """This rank and another one, which sees the checkpoint or not."""

    def __init__(self, other_sees: bool):
        self.other_sees = other_sees

    def gather(self, array: np.ndarray) -> np.ndarray:
        return np.stack([array, np.array([self.other_sees], array.dtype)])


def test_all_ranks_must_see_the_checkpoint(tmp_path):
    whole = tmp_path / "checkpoint-2"
    whole.mkdir()
    (whole / STATE_FILE).write_text("{}")
    check_all_see(None, TwoRanks(True))
    check_all_see(str(whole), TwoRanks(True))
    missing = tmp_path / "checkpoint-4"
    cases = [(whole, False, "rank 1"), (missing, True, "rank 0"), (missing, False, "rank 0 and")]
    for folder, other_sees, blind in cases:
        message = refusal(check_all_see, str(folder), TwoRanks(other_sees))
        assert message.startswith(f"run.output_dir: {blind}")
        assert " cannot see " in message and folder.name in message and "share" in message
