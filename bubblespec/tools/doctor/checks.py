"""What is checked: each check is a generator of lines, which all ranks make together.
Shape legend: N packed tokens, V vocabulary."""

import contextlib
import gc
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import combinations
from typing import NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from bubblespec.config import Config
from bubblespec.distributed.device import cuda_of_driver, why_no_gpu
from bubblespec.distributed.ranks import Ranks
from bubblespec.draft.store import exchange
from bubblespec.engine.compiled import compared, compile_reduction
from bubblespec.engine.graphs import ForwardGraphs, can_capture
from bubblespec.engine.kernels import cache_for, packed_logits
from bubblespec.engine.kv_cache import KVCache
from bubblespec.engine.model import (
    TOLERANCE,
    forward_hidden,
    random_tokens,
    relative_difference,
)
from bubblespec.engine.output_head import output_head
from bubblespec.engine.packing import PAGE, pack_rows
from bubblespec.engine.sampling import best_and_sum
from bubblespec.errors import InputError
from bubblespec.loading import load_model
from bubblespec.mechanisms.tp_tail.shards import (
    Shards,
    TPGroup,
    TPUnsupported,
    no_shared_tail,
    shard_of,
)
from bubblespec.memory import max_length, max_slots
from bubblespec.planner.place import place_in_turn
from bubblespec.rollout.board import ProgressBoard, RankState, SharedTicks, make_transport
from bubblespec.rollout.loop import RolloutLoop
from bubblespec.rollout.table import RowTable
from bubblespec.setup import build, prepare
from bubblespec.telemetry.trace import describe_hardware
from bubblespec.trainer import Trainer
from bubblespec.types import Draft, Launch, Row, SampleId

WARM_UP, NUM_TIMED = 3, 20
NUM_SAMPLED = 128  # positions of the check of sampling
# Of the rollouts: long enough for drafts to be right and wrong, and no minutes for a small model.
MIN_PROMPTS, MAX_RESPONSES, MAX_TOKENS = 2, 8, 64
FREE_SHARE = 0.9  # of a GPU's memory; with less someone else is on it


class Line(NamedTuple):
    """What a check has found. verdict: ok, slower or failed."""

    verdict: str
    text: str


ok, slower, failed = (partial(Line, verdict) for verdict in ("ok", "slower", "failed"))


@dataclass
class Case:
    """What checks are about, and what they leave for those after them."""

    config: Config
    ranks: Ranks
    model: PreTrainedModel | None = None
    """Until the run is set up, which loads one of its own."""
    kernel: str = "sdpa"
    slower: str | None = None
    """A line, where the kernel is a fallback."""
    trainer: Trainer | None = None


class Check(NamedTuple):
    """make: its lines, on all ranks together; avoid: what avoids an error that names no key itself;
    needs: the check without which it is not made."""

    make: Callable[[Case], Iterator[Line]]
    avoid: str
    needs: str | None = None


def versions(case: Case) -> Iterator[Line]:
    """Of what forwards go through."""
    names = ["torch", "transformers"]
    names += ["flash-attn"] * (importlib.util.find_spec("flash_attn") is not None)
    found = [f"python {platform.python_version()}", *(f"{n} {metadata.version(n)}" for n in names)]
    yield ok(", ".join(found + [f"cuda {torch.version.cuda}"] * (torch.version.cuda is not None)))


def devices(case: Case) -> Iterator[Line]:
    """What ranks run on, its memory, and whether GPUs reach each other's."""
    ranks, num_local, host = case.ranks, local_ranks(), psutil.virtual_memory()
    hardware = describe_hardware(ranks.device)
    threads, cores = hardware["threads"], hardware["cores"]
    yield ok(
        f"{ranks.world_size} ranks with {threads} threads each; {cores} cores ({hardware['cpu']}) "
        f"with {host.available / 1e9:.3g} of {host.total / 1e9:.3g} GB of memory free"
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
    """It loads, and its packed attention gives its own logits (`prepare_model`)."""
    config, began_s = case.config, time.perf_counter()
    loaded = load_model(config, None, case.ranks.device)
    size = f"{sum(p.numel() for p in loaded.parameters()) / 1e6:.3g} M parameters"
    read_s = time.perf_counter() - began_s
    yield ok(f"{config.model.path}: {size} in {config.model.dtype}, read in {read_s:.1f} s")
    case.kernel, case.slower = prepare(config, loaded, case.ranks)
    case.model = loaded
    longest = max_length(config)
    yield ok(f"packed sequences of up to {longest} tokens have the same logits as unpacked ones")


def attention(case: Case) -> Iterator[Line]:
    """The kernel in use, which gives what SDPA gives: `prepare` has compared them."""
    if case.slower is not None:
        yield slower(case.slower)
    elif case.ranks.device.type == "cuda" and case.kernel == "sdpa":
        yield slower("attention is sdpa; model.attention=auto")
    else:
        others = "; other kernels run on CUDA only" if case.ranks.device.type == "cpu" else ""
        yield ok(f"attention is {case.kernel}{others}")


@torch.inference_mode()
def graphs(case: Case) -> Iterator[Line]:
    """Forwards of few tokens as CUDA graphs, against eager ones."""
    loaded, kernel, device = case.model, case.kernel, case.model.device
    if case.ranks.device.type == "cpu":
        yield ok("not applicable: a CPU has none")
        return
    is_eager = case.config.rollout.enforce_eager
    if is_eager or not can_capture(case.ranks.device, kernel):
        why = "rollout.enforce_eager=true" if is_eager else "model.attention is sdpa"
        yield slower(f"there are none; {why}")
        return
    cache, tokens = cache_for(kernel, num_spare=1), random_tokens(loaded, 1)
    packing = pack_rows(cache, np.zeros(1, np.int64), np.ones(1, np.int64), device)
    captured = ForwardGraphs(loaded, cache, kernel, 16)
    replay = partial(captured.forward, tokens, packing)
    if replay() is None:
        yield slower(captured.problem)
        return
    replayed = packed_logits(loaded, cache, kernel, captured.forward)
    eager = packed_logits(loaded, cache_for(kernel), kernel)
    yield close(replayed, eager, "graphs and eager forwards", "rollout.enforce_eager=true")
    actions = (replay, partial(forward_hidden, loaded, tokens, packing, kernel))
    graph_ms, eager_ms = (1e3 * median_s(action, device) for action in actions)
    yield ok(f"a forward of one token takes {graph_ms:.2f} ms, eager {eager_ms:.2f} ms")


@torch.inference_mode()
def sampling(case: Case) -> Iterator[Line]:
    """The compiled reduction of logits against the eager one."""
    if case.ranks.device.type == "cpu":
        yield ok("not applicable: eager on a CPU")
        return
    head, dtype, device = output_head(case.model), case.model.dtype, case.model.device
    if case.config.rollout.enforce_eager:
        yield slower("sampling is eager; rollout.enforce_eager=true")
        return
    compiled, line = compile_reduction(head.num_tokens, dtype, device)
    if line is not None:
        yield slower(line)
        return
    given = compared(NUM_SAMPLED, head.num_tokens, dtype, device)
    ms, eager_ms = (1e3 * median_s(partial(f, *given), device) for f in (compiled, best_and_sum))
    yield ok(f"the same {NUM_SAMPLED} tokens take {ms:.2f} ms compiled, eager {eager_ms:.2f} ms")


@torch.inference_mode()
def shared_tail(case: Case) -> Iterator[Line]:
    """A forward of all ranks together against one of each alone."""
    ranks, loaded, device = case.ranks, case.model, case.ranks.device
    avoid = "rollout.tp_tail_max_rows=0"
    if ranks.world_size == 1 or case.config.rollout.tp_tail_max_rows == 0:
        yield ok(f"not applicable: {'one rank' if ranks.world_size == 1 else avoid}")
        return
    try:
        shards = Shards(loaded, TPGroup(ranks))
        shards.check(case.kernel)
    except TPUnsupported as error:
        yield slower(no_shared_tail(error))
        return
    tokens, one, head = random_tokens(loaded, 1), np.ones(1, np.int64), output_head(loaded)
    whole, part = (pack_rows(KVCache(1, PAGE), 0 * one, one, device) for _ in range(2))

    def together() -> torch.Tensor:
        with shards.applied():
            hidden = forward_hidden(loaded, tokens, part)
        return shards.logits(hidden)

    def alone() -> torch.Tensor:
        return head(forward_hidden(loaded, tokens, whole))

    own = shard_of(head.num_tokens, ranks.rank, ranks.world_size)
    yield close(together(), alone()[:, own], "forwards together and alone", avoid)
    together_ms, alone_ms = (1e3 * median_s(action, device) for action in (together, alone))
    took = f"{together_ms:.2f} ms on all ranks together, {alone_ms:.2f} ms on each alone"
    yield ok(f"a forward of one token takes {took}")


def set_up(case: Case) -> Iterator[Line]:
    """As a run is: data, rewards, memory, costs of forwards."""
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
    """All-reduces of the group, and the ticks by which ranks tell each other how far they are."""
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
        line += f"; {min(tick_us, key=tick_us.get)} is faster (rollout.progress_backend)"
    elif local_ranks() == ranks.world_size:
        yield slower(f"{line}: shared memory is unavailable here")
        return
    yield ok(line)


def _tick_us(board: ProgressBoard) -> float:
    """Median microseconds of a tick without pauses, the mean over ranks."""

    def tick(state: RankState) -> None:
        while board.poll(lambda: state) is None:
            pass

    own_us = 1e6 * median_s(partial(tick, RankState(1)), board.ranks.device)
    tick(RankState(0))  # the last
    return float(board.ranks.gather(np.array([own_us])).mean())


def rollouts(case: Case) -> Iterator[Line]:
    """Some responses of the first step without drafts, and again with drafts that hold in part: the
    same tokens."""
    ranks, sampler, rollout = case.ranks, case.trainer.sampler, case.config.rollout
    # The first turns of episodes are compared.
    sampler.mechanisms[:] = [each for each in sampler.mechanisms if each.name != "episodes"]
    longest = min(rollout.max_completion_length, MAX_TOKENS)
    rollout.max_completion_length = longest  # also of what is drafted ahead
    groups = sampler.schedule.launch(0).groups[: max(MIN_PROMPTS, ranks.world_size)]
    size = min(rollout.num_generations, MAX_RESPONSES)
    rank_of = place_in_turn(len(groups), size, ranks.world_size)
    launch = Launch(groups, len(groups), size)
    tables = [RowTable(launch, rank_of, ranks.rank) for _ in range(2)]
    plain, drafted = (table.make_rows(longest) for table in tables)
    loop = RolloutLoop(sampler.engine, ranks, sampler.params, plain, tables[0])
    plain_s = seconds_together(loop.run, ranks)
    responses = f"{len(rank_of)} responses of up to {longest} tokens"
    if sampler.proposer is None:
        yield ok(f"{responses} take {plain_s:.2f} s; speculative.method=none has no drafts")
        return
    exchange(sampler.store, spoilt(plain.values()), ranks)
    sampler.proposer.always = True  # whether drafts pay is not the question
    records = []

    def roll_out() -> None:
        record, tasks = sampler.roll_out(tables[1], drafted, 0, groups)
        sampler.conclude(record, tasks, tables[1], drafted, 0)
        records.append(record.acceptance)

    drafted_s = seconds_together(roll_out, ranks)
    differing = sum(not np.array_equal(row.tokens, drafted[i].tokens) for i, row in plain.items())
    counts = [differing, records[0].draft_tokens, records[0].accepted_tokens]
    differing, num_drafts, accepted = ranks.gather(np.array(counts)).sum(axis=0).tolist()
    took = f"{plain_s:.2f} s without drafts, {drafted_s:.2f} s with {num_drafts} draft tokens, "
    took += f"{accepted} of them accepted"
    dtype = case.config.model.dtype
    if not differing:
        yield ok(f"{responses} are the same with and without drafts: {took}")
    elif dtype == "bfloat16":
        rounding = "bfloat16 rounds batches of other shapes differently"
        yield ok(f"{differing / len(rank_of):.0%} of {responses} differ, as {rounding}: {took}")
    else:
        tie = " (a near tie, unless another run.seed differs too)" if dtype == "float32" else ""
        yield failed(f"{differing} of {responses} differ with drafts{tie}; speculative.method=none")
    if "drafter" in case.config.speculative.sources:
        yield ok("the learned drafter was not tried, as it is trained before the first step")


def close(got: torch.Tensor, wanted: torch.Tensor, what: str, avoid: str) -> Line:
    """Whether logits differ by no more than `prepare_model` tolerates. avoid: the key if not."""
    difference = relative_difference(got, wanted)
    line = f"logits of {what} differ by {difference:.1e} of their size"
    is_close = difference <= TOLERANCE.get(wanted.dtype, 0.1)
    return ok(line) if is_close else failed(f"{line}; {avoid}")


def spoilt(rows: Iterable[Row]) -> dict[SampleId, Draft]:
    """Drafts of finished rows that are as these are, but for one token in the middle."""
    drafts = {}
    for row in rows:
        tokens = row.tokens.astype(np.int32)
        tokens[len(tokens) // 2] = row.prompt[0]
        drafts[row.id] = Draft(tokens, is_finished=True, version=0)
    return drafts


def median_s(action: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, until the device has done it."""
    seconds = []
    for _ in range(WARM_UP + NUM_TIMED):
        began_s = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[WARM_UP:])


def seconds_together(action: Callable[[], object], ranks: Ranks) -> float:
    """Of the slowest rank: from one barrier to the next."""
    ranks.barrier()
    began_s = time.perf_counter()
    action()
    ranks.barrier()
    return time.perf_counter() - began_s


def local_ranks() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


CHECKS: dict[str, Check] = {
    "versions": Check(versions, "pip install -r requirements.txt"),
    "devices": Check(devices, "model.device=cpu"),
    "model": Check(model, "model.path, model.dtype"),
    "attention": Check(attention, "model.attention=sdpa", "model"),
    "graphs": Check(graphs, "rollout.enforce_eager=true", "model"),
    "sampling": Check(sampling, "rollout.enforce_eager=true", "model"),
    "shared tail": Check(shared_tail, "rollout.tp_tail_max_rows=0", "model"),
    "set-up": Check(set_up, "a smaller rollout.max_num_seqs", "model"),
    "collectives": Check(collectives, "--nproc_per_node=1", "set-up"),
    "rollouts": Check(rollouts, "speculative.method=none", "set-up"),
}
