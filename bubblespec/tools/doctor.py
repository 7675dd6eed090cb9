"""Check whether this machine can run a configuration, on one rank or on all:

python -m bubblespec doctor --config FILE [section.key=value ...]

torchrun --nproc_per_node=8 -m bubblespec doctor --config FILE [section.key=value ...]

Every check prints lines: `ok`, `slower` where a slower fallback is used, or `failed`; the last two
name the key that matters. A failed check stops only the checks that need it. The checks go from
versions to the first rollouts of the whole run. Nothing is left on disk.
"""

import contextlib
import gc
import importlib.util
import json
import os
import platform
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import combinations

import numpy as np
import torch
import torch.distributed as dist

from bubblespec.config.file import load_config
from bubblespec.distributed.ranks import Ranks, cuda_of_driver, ranks_from_environment, why_no_gpu
from bubblespec.draft.store import exchange
from bubblespec.engine.arrays import median_s
from bubblespec.engine.kv_cache import PAGE
from bubblespec.errors import EndsRun, InputError, RankTimeout, RunFailed, log, one_line
from bubblespec.learn.agreement import generation_problem, rows_problem
from bubblespec.loading import load_model, with_dtype
from bubblespec.mechanisms import Run
from bubblespec.memory import host_bytes, max_length, max_slots
from bubblespec.planner.place import place_in_turn
from bubblespec.rollout.board import ProgressBoard, RankState, SharedTicks, make_transport
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.plan import RolloutPlan
from bubblespec.rollout.sampler import Rollout
from bubblespec.rollout.table import RowTable
from bubblespec.setup import build, call, prepare
from bubblespec.telemetry.trace import describe_hardware
from bubblespec.tools import forwards, make_parser, parse
from bubblespec.tools.forwards import Case, Check, Line, failed, ok, slower
from bubblespec.types import Draft, Launch, Row, SampleId

TIMEOUT_S = 300.0  # that a rank waits for another, at most: run.timeout_s may be hours
# The compared rollouts: long enough for drafts to be right and wrong, short enough to take seconds.
MIN_PROMPTS, MAX_RESPONSES, MAX_TOKENS = 2, 8, 64
FREE_SHARE = 0.9  # of a GPU's memory; with less another program uses it


def versions(case: Case) -> Iterator[Line]:
    """List the versions of Python and of the packages that compute forwards."""
    names = ["torch", "transformers"]
    names += ["flash-attn"] * (importlib.util.find_spec("flash_attn") is not None)
    found = [f"python {platform.python_version()}", *(f"{n} {metadata.version(n)}" for n in names)]
    yield ok(", ".join(found + [f"cuda {torch.version.cuda}"] * (torch.version.cuda is not None)))


def devices(case: Case) -> Iterator[Line]:
    """Describe the devices, their memory and the links between GPUs."""
    ranks, num_local, host = case.ranks, local_ranks(), host_bytes()
    hardware = describe_hardware(ranks.device)
    threads, cores = hardware["threads"], hardware["cores"]
    yield ok(
        f"{ranks.world_size} ranks with {threads} threads each; {cores} cores ({hardware['cpu']}) "
        f"with {host[0] / 1e9:.3g} of {host[1] / 1e9:.3g} GB of memory free"
    )
    if ranks.device.type == "cpu":
        if num_local * threads > cores:
            yield slower(f"{num_local * threads} threads share {cores} cores; OMP_NUM_THREADS=1")
        if torch.cuda.is_available():
            yield slower("this machine has an unused GPU; model.device=cuda")
        elif cuda_of_driver() is not None:
            yield slower(f"{why_no_gpu()}; or model.device=cpu")
        return
    free, total = torch.cuda.mem_get_info(ranks.device)
    memory = f"{free / 1e9:.3g} of {total / 1e9:.3g} GB are free"
    yield ok(f"GPUs: {num_local} x {hardware['gpu']}, {memory}")
    if free < FREE_SHARE * total:
        yield slower(f"others use {ranks.device}, {memory}; CUDA_VISIBLE_DEVICES")
    if (num_cards := torch.cuda.device_count()) > num_local:
        yield slower(f"{num_local} of {num_cards} GPUs are used; --nproc_per_node={num_cards}")
    pairs = list(combinations(range(num_local), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        which = f"{len(apart)} of {len(pairs)} pairs of GPUs, {apart[0]} for one,"
        yield slower(f"{which} have no direct link; rollout.tp_tail_max_rows=0 exchanges less")
    elif pairs:
        yield ok("all pairs of GPUs have direct links")


def model(case: Case) -> Iterator[Line]:
    """Load the model and compare its packed attention with its own (`prepare_model`)."""
    config, began_s = case.config, time.perf_counter()
    loaded = load_model(config, None, case.ranks.device)
    size = f"{sum(p.numel() for p in loaded.parameters()) / 1e6:.3g} M parameters"
    read_s = time.perf_counter() - began_s
    yield ok(f"{config.model.path}: {size} in {config.model.dtype}, read in {read_s:.1f} s")
    run = Run(config, case.ranks, loaded)
    call("load", run)
    case.kernel, case.slower = prepare(run, loaded)
    case.model = loaded
    longest = max_length(config)
    yield ok(f"packed sequences of up to {longest} tokens have the same logits as unpacked ones")


def set_up(case: Case) -> Iterator[Line]:
    """Set up a whole run: data, rewards, memory, costs of forwards."""
    config, ranks, case.model = case.config, case.ranks, None
    gc.collect()
    torch.cuda.empty_cache()
    began_s = time.perf_counter()
    case.trainer = build(config, ranks)
    if case.trainer.lock is not None:
        case.trainer.lock.close()
    engine, useful = case.trainer.sampler.engine, max_slots(config, ranks.world_size)
    num_slots, room = engine.num_slots, f"{max_length(config)} tokens each"
    if engine.pages is not None:
        room = f"{engine.pages.num_pages} pages of {PAGE} tokens in all"
    room = f"each rank has room for {num_slots} responses at once, {room}"
    yield ok(f"{room}; set-up took {time.perf_counter() - began_s:.1f} s")
    if num_slots < useful:
        yield slower(f"{useful} at once could be used; rollout.max_num_seqs (docs/gpu-guide.md)")


def collectives(case: Case) -> Iterator[Line]:
    """Time all-reduces of the group and progress ticks."""
    ranks, board = case.ranks, case.trainer.sampler.board
    if ranks.world_size == 1:
        yield ok("not applicable: one rank")
        return
    sum_us = 1e6 * median_s(ranks.barrier, ranks.device)
    yield ok(f"an all-reduce of one number takes {sum_us:.0f} us ({dist.get_backend()})")
    if board is None:
        yield ok("ranks do not exchange progress in this configuration")
        return

    transports, timeout_s = [board.transport], case.config.run.timeout_s
    other = dist.get_backend() if board.transport.name == SharedTicks.name else "shm"
    with contextlib.suppress(InputError):  # no shared memory
        transports.append(make_transport(ranks, timeout_s, other))
    tick_us = {t.name: _tick_us(ProgressBoard(ranks, timeout_s, t, 0.0)) for t in transports}
    took = " and ".join(f"{us:.0f} us over {name}" for name, us in tick_us.items())
    line = f"exchanging their progress takes ranks {took}"
    if len(tick_us) > 1:
        line += f"; {min(tick_us, key=tick_us.__getitem__)} is faster (rollout.progress_backend)"
    elif local_ranks() == ranks.world_size:
        yield slower(f"{line}: shared memory is unavailable here")
        return
    yield ok(line)


def _tick_us(board: ProgressBoard) -> float:
    """Return the median microseconds of a tick without pauses, averaged over ranks."""

    def tick(state: RankState) -> None:
        while board.poll(lambda: state) is None:
            pass

    own_us = 1e6 * median_s(partial(tick, RankState(1)), board.ranks.device)
    tick(RankState(0))  # the last
    return float(board.ranks.gather(np.array([own_us])).mean())


def rollouts(case: Case) -> Iterator[Line]:
    """Compare rollouts with forwards of transformers' modules, and drafted with plain ones.

    These are rows of random tokens, then some responses of the first step without drafts and with
    partly right ones."""
    ranks, sampler, rollout = case.ranks, case.trainer.sampler, case.config.rollout
    learner, seed = case.trainer.learner, case.config.run.seed
    avoid = "rollout.enforce_eager=true" if ranks.device.type == "cuda" else "model.dtype=float32"
    if (problem := generation_problem(sampler.engine.runner, sampler.params)) is not None:
        yield failed(f"{problem}; {avoid}")
    else:
        yield ok("log-probabilities and tokens are those of forwards by transformers' modules")
    # The first turns of episodes are compared.
    sampler.mechanisms[:] = [each for each in sampler.mechanisms if each.name != "episodes"]
    longest = min(rollout.max_completion_length, MAX_TOKENS)
    rollout.max_completion_length = longest  # also of what is drafted ahead
    groups = sampler.schedule.launch(0).groups[: max(MIN_PROMPTS, ranks.world_size)]
    size = min(rollout.num_generations, MAX_RESPONSES)
    rank_of = place_in_turn(len(groups), size, ranks.world_size)
    launch = Launch(groups, len(groups), size)
    tables = [RowTable(launch, rank_of, ranks.rank) for _ in range(2)]
    plain, drafted = (RolloutPlan(t, t.make_rows(longest), sampler.params) for t in tables)
    plain_s = forwards.seconds_together(RolloutLoop(sampler.engine, ranks, None, plain).run, ranks)
    responses = f"{len(rank_of)} responses of up to {longest} tokens"
    if sampler.proposer is None:
        yield ok(f"{responses} take {plain_s:.2f} s; speculative.method=none has no drafts")
        return
    exchange(sampler.store, spoilt(plain.rows.values()), ranks)
    drafted.step, drafted.used, drafted.proposer = 0, groups, sampler.proposer
    for row in drafted.rows.values():
        row.draft = sampler.store.get(row.id)
    sampler.proposer.always = True  # whether drafts pay is not the question
    rollouts: list[Rollout] = []
    drafted_s = forwards.seconds_together(lambda: rollouts.append(sampler.rollout(drafted)), ranks)
    pairs = [(row, drafted.rows[index]) for index, row in plain.rows.items()]
    differing = sum(not np.array_equal(a.tokens, b.tokens) for a, b in pairs)
    acceptance = rollouts[0].record.acceptance
    counts = [differing, acceptance.draft_tokens, acceptance.accepted_tokens]
    differing, num_drafts, accepted = ranks.gather(np.array(counts)).sum(axis=0).tolist()
    took = f"{plain_s:.2f} s without drafts, {drafted_s:.2f} s with {num_drafts} draft tokens, "
    took += f"{accepted} of them accepted"
    dtype = case.config.model.dtype
    rows = [*plain.rows.values(), *drafted.rows.values()]
    problem = rows_problem(learner.model, rows, sampler.params, seed)
    if differing and dtype != "bfloat16":
        tie = " (a near tie, unless another run.seed differs too)" if dtype == "float32" else ""
        yield failed(f"{differing} of {responses} differ with drafts{tie}; speculative.method=none")
    elif problem is not None:
        yield failed(f"{problem}; {avoid}")
    elif differing:
        rounding = "bfloat16 rounds batches of other shapes differently"
        yield ok(f"{differing / len(rank_of):.0%} of {responses} differ, as {rounding}: {took}")
    else:
        yield ok(f"{responses} are the same with and without drafts: {took}")
    if "drafter" in case.config.speculative.sources:
        yield ok("the learned drafter was not tried, as it is trained before the first step")


def spoilt(rows: Iterable[Row]) -> dict[SampleId, Draft]:
    """Return drafts that equal finished rows except for one token in the middle."""
    drafts = {}
    for row in rows:
        tokens = row.tokens.astype(np.int32)
        tokens[len(tokens) // 2] = row.prompt[0]
        drafts[row.id] = Draft(tokens, is_finished=True, version=0)
    return drafts


def local_ranks() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


CHECKS: dict[str, Check] = {
    "versions": Check(versions, "pip install -r requirements.txt"),
    "devices": Check(devices, "model.device=cpu"),
    "model": Check(model, "model.path, model.dtype"),
    "attention": Check(forwards.attention, "model.attention=sdpa", "model"),
    "gradient": Check(forwards.gradient, "model.attention=sdpa", "model"),
    "graphs": Check(forwards.graphs, "rollout.enforce_eager=true", "model"),
    "quantised copy": Check(forwards.quantized, "speculative.method=bubble+suffix", "model"),
    "TP tail": Check(forwards.tp_tail, "rollout.tp_tail_max_rows=0", "model"),
    "set-up": Check(set_up, "a smaller rollout.max_num_seqs", "model"),
    "collectives": Check(collectives, "--nproc_per_node=1", "set-up"),
    "rollouts": Check(rollouts, "speculative.method=none", "set-up"),
}


def examine(case: Case) -> list[str]:
    """Run all checks on all ranks together, print their lines and return the names that failed.

    The names are equal on all ranks. Raises RunFailed where a rank no longer answers."""
    failures: list[str] = []
    passed: set[str | None] = {None}
    is_apart = False  # ranks have missed a collective, and there can be no further one
    for name, check in CHECKS.items():
        if is_apart or check.needs not in passed:
            why = "ranks are out of step" if is_apart else f"{check.needs} failed"
            of_ranks = [[failed(f"not made, as {why}")]]
        else:
            if case.ranks.is_main:
                log(f"doctor: {name} ...")
            case.ranks.activity = f"the check of {name}"
            of_ranks, is_apart = compare(case.ranks, name, *attempt(check, case))
            if any(line.verdict == "failed" for lines in of_ranks for line in lines):
                failures.append(name)
            else:
                passed.add(name)
        if case.ranks.is_main:
            show(name, of_ranks)
    return failures


def attempt(check: Check, case: Case) -> tuple[list[Line], bool]:
    """Return this rank's lines, errors included, and whether it timed out waiting for others."""
    lines: list[Line] = []
    is_late = False
    try:
        lines.extend(check.make(case))  # lines before an error are kept
    except EndsRun as error:  # an InputError names the key
        is_late = isinstance(error, RankTimeout)
        lines.append(failed(f"{error}; {check.avoid}" if is_late else str(error)))
    except Exception as error:  # any error of a driver, a kernel or a library
        lines.append(failed(f"{one_line(error)}; {check.avoid}"))
    return lines, is_late


def compare(
    ranks: Ranks, name: str, lines: list[Line], is_late: bool
) -> tuple[list[list[Line]], bool]:
    """Return the lines of all ranks, by rank, and whether any was late. Raises RunFailed.

    They are exchanged through the job's key-value store, as a failed rank may have left others
    alone in a collective."""
    if ranks.world_size == 1:
        return [lines], is_late
    store = dist.PrefixStore("doctor", dist.distributed_c10d._get_default_store())
    keys = [f"{name}/{rank}" for rank in range(ranks.world_size)]
    store.set(keys[ranks.rank], json.dumps((lines, is_late)))
    # Another one may wait for this rank for as long as a collective may, and begin to later.
    deadline = time.monotonic() + 2 * ranks.timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise RunFailed(f"{name}: no answer from rank {', '.join(silent)}")
        time.sleep(1e-3)
    answers = [json.loads(store.get(key)) for key in keys]
    return [[Line(*line) for line in of] for of, _ in answers], any(late for _, late in answers)


def show(name: str, of_ranks: list[list[Line]]) -> None:
    """Print the lines of rank 0, and problems that only other ranks found."""
    for rank, lines in enumerate(of_ranks):
        for verdict, text in lines:
            if rank == 0 or (verdict != "ok" and (verdict, text) not in of_ranks[0]):
                text = text if rank == 0 else f"rank {rank}: {text}"
                print(f"{name:<11} {verdict}: {text}", flush=True)


def next_command(config_path: str, overrides: list[str], ranks: Ranks) -> str:
    """Return the training command: on as many ranks or, without a launcher, on all GPUs."""
    num_local, num_machines = local_ranks(), ranks.world_size // local_ranks()
    if "RANK" not in os.environ and ranks.device.type == "cuda":
        num_local = torch.cuda.device_count()
    nodes = [f"--nnodes={num_machines}"] * (num_machines > 1)
    launcher = ["torchrun", *nodes, f"--nproc_per_node={num_local}", "train.py"]
    return shlex.join([*launcher, "--config", config_path, *overrides])


def main(arguments: list[str]) -> None:
    """Run all checks. Raises RunFailed if one fails."""
    given = parse(make_parser("doctor"), arguments)
    config = load_config(given.config, given.overrides)
    timeout_s = min(config.run.timeout_s, TIMEOUT_S)
    with (
        ranks_from_environment(config.model.device, timeout_s) as ranks,
        tempfile.TemporaryDirectory() as folder,
    ):
        config = with_dtype(config, ranks.device.type)
        own = replace(config.run, output_dir=folder, timeout_s=timeout_s)
        own.resume_from_checkpoint = "none"
        case = Case(replace(config, run=own), ranks)
        if names := examine(case):
            raise RunFailed(f"checks that failed: {', '.join(names)}")
        if ranks.is_main:
            print("no check failed; this trains:", flush=True)
            print(next_command(given.config, given.overrides, ranks), flush=True)
