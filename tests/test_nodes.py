"""More than one machine: two launchers that find each other over loopback, each with one rank,
against one with two ranks."""

import socket

from tests.helpers.runs import (
    SHORT,
    digests,
    launch_with_agent,
    read,
    same_weights,
    steps_of,
    weights,
)
from tests.helpers.threads import train_on_threads

SHORTER = [*SHORT, "run.max_steps=2", "run.save_steps=0", "eval.num_prompts=0"]
SHORTER += ["rollout.num_prompts_per_step=4", "rollout.max_completion_length=24"]


def run_on_two_nodes(output_dir, *overrides: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = ["train.py", "--config", "configs/tiny_cpu_bulk.yaml", *SHORTER, *overrides]
    script.append(f"run.output_dir={output_dir}")
    codes, said = launch_with_agent(script, 1, 2, rdzv_endpoint=f"127.0.0.1:{port}")
    assert codes == [0, 0], said[-3000:]


def test_two_nodes_give_the_bits_of_one_node(tmp_path):
    """And whatever else only saves memory changes nothing: sharded state, slots chosen by free
    memory, a cache that is freed."""
    train_on_threads(2, *SHORTER, f"run.output_dir={tmp_path / 'one'}")
    saving = ("rollout.max_num_seqs=auto", "rollout.free_cache_engine=true")
    run_on_two_nodes(tmp_path / "two", "optim.shard_state=true", *saving)
    assert digests(tmp_path / "two") == digests(tmp_path / "one")
    assert len(digests(tmp_path / "one")) == 2
    assert all(line["grad_norm"] > 0 for line in read(tmp_path / "one")), "it must have learned"
    assert same_weights(weights(tmp_path / "two", 2), weights(tmp_path / "one", 2))
    assert all("timing_s/gen/rank_1" in line for line in steps_of(tmp_path / "two"))
