"""Plain runs that others are compared with: without drafts, on two ranks, undisturbed. Each is made
once in the whole test run, whichever file asks for it first."""

import fcntl
import hashlib
import os

from tests.helpers.runs import digests, read, weights
from tests.helpers.threads import train_on_threads

STEPS = 3
TINY = ["rollout.num_prompts_per_step=6", "rollout.num_generations=3"]
TINY += ["rollout.max_completion_length=24", "data.size=64", "eval.num_prompts=4"]
TINY += ["eval.num_generations=2", f"run.max_steps={STEPS}", "run.eval_steps=0", "run.save_steps=2"]
TINY += ["model.dtype=float64", "optim.learning_rate=1e-3"]
REWARD = "reward.functions=[tests.helpers.rewards.remainder]"
KEYS = ("loss", "grad_norm", "entropy", "reward", "kl")
NO_DRAFTS = ["speculative.method=none", "rollout.tp_tail_max_rows=0"]


def plain_run(tmp_path_factory, *options: str):
    """The folder of the plain run with these options, made here unless there is one already."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    folder = root / f"plain-{hashlib.sha256(repr(options).encode()).hexdigest()[:16]}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not os.path.exists(f"{folder}.done"):
            train_on_threads(2, *options, *NO_DRAFTS, f"run.output_dir={folder}")
            assert len(set(digests(folder))) == STEPS, "the policy must learn something"
            open(f"{folder}.done", "w").close()
    return folder


def check_same(folder, plain, keys=KEYS, *, is_exact=False):
    """Equal tokens, and weights and metrics up to the order of summation; to the bit if is_exact.
    Adam divides gradients by their size: what is rounded in small ones shows in the weights."""
    assert digests(folder)[-STEPS:] == digests(plain) and len(digests(plain)) == STEPS
    ours, wanted = weights(folder, STEPS), weights(plain, STEPS)
    assert ours.keys() == wanted.keys()
    for name, weight in wanted.items():
        if name.startswith("mtp."):
            continue  # the head that drafts, which idle time trains
        assert (ours[name] - weight).abs().max() <= (0.0 if is_exact else 1e-6), name
    for line, other in zip(read(folder), read(plain), strict=True):
        for key in set(keys) & other.keys():
            assert abs(line[key] - other[key]) <= max(1e-5 * abs(other[key]), 1e-8), key
