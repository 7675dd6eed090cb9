"""Ranks: their devices, process group, collectives, time-outs and stop signals.

The other ranks name a rank that hangs or has died, within `run.timeout_s`; a rank that fails ends
all (failures.py). STOP_SIGNALS end a process at once during set-up. In the training loop they only
set a flag, which the ranks exchange at the next `Ranks.barrier_or_stop`. A single process works
too."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bubblespec.distributed.failures import Watchdog, join_store, leave, log_once
from bubblespec.distributed.processes import STOP_SIGNALS, die_with_parent, guard_forks
from bubblespec.errors import (
    EndsRun,
    InputError,
    Interrupt,
    RankTimeout,
    RunFailed,
    escape,
    gpu_problem,
    log,
)

# torch 2.13 renames the collective; 2.11 has the old name only.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Raised in a collective, these are this rank's own, and keep their traceback. A CUDA error of an
# earlier kernel shows in whatever call comes next.
OWN_ERRORS = (RankTimeout, torch.OutOfMemoryError, torch.AcceleratorError)
MAX_NAP_S = 1e-3  # between polls: a blocking wait reacts neither to the time-out nor to signals
SAME_CTRL_C_S = 1.0  # one Ctrl-C may reach a rank twice, from the terminal and from the launcher
# NVIDIA's CUDA Compatibility, minor version compatibility: the oldest driver of each major version
OLDEST_DRIVER = {12: 525, 13: 580}
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class StopRequested(Exception):
    """A rank has been told to stop. All ranks raise this at the same place, between two updates."""


class CallAbandoned(Interrupt):
    """This rank has been told to stop in a call that `Ranks.call_until_stop` may abandon."""


class Ranks:
    """This process among all ranks, and their collectives.

    Collectives raise RankTimeout; with one rank they are the identity."""

    def __init__(self, device: torch.device, timeout_s: float = 1800.0):
        """timeout_s: seconds that a collective may wait for the slowest rank."""
        self.device, self.timeout_s = device, timeout_s
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.is_main = self.rank == 0
        # What the ranks are doing, for the message that names a missing one.
        self.activity = "set-up"
        self.must_stop = False  # a stop request to this rank, which `barrier_or_stop` exchanges
        self.signal = 0  # that requested it
        self.exit_code = 0  # of the process: 128 + the signal after which all ranks have stopped
        self.is_interruptible = False  # see `call_until_stop`
        # Called before the process group ends: NCCL waits for graphs with its collectives to go.
        self.before_end: list[Callable[[], None]] = []
        # of rollouts: the `time` module, or a substitute with perf_counter, monotonic and sleep
        self.clock = time
        self.watchdog = Watchdog(self.rank, self.world_size) if self.world_size > 1 else None
        # Gathers in memory that all ranks share (shared_memory.py); None: by the process group.
        self.shared: Any = None

    def barrier(self) -> None:
        if self.shared is not None:
            self.all_gather(np.zeros(1))
        else:
            self.all_reduce_(torch.zeros(1, device=self.device))

    def barrier_or_stop(self) -> None:
        """Wait for all ranks. Raises StopRequested on all ranks if any has a stop request."""
        request = np.array([self.signal if self.must_stop else -1])
        if (number := int(self.all_gather(request).max())) >= 0:
            self.exit_code = 128 + number
            raise StopRequested

    def call_until_stop(self, call: Callable[[], None]) -> None:
        """Call the user's code here, until a stop request: it may wait for ended processes."""
        with contextlib.suppress(CallAbandoned):
            try:
                self.is_interruptible = True
                if not self.must_stop:
                    call()
            finally:
                self.is_interruptible = False

    def is_told_to_stop(self) -> bool:
        """Whether any rank has a stop request, for use while this rank waits outside a collective.

        It then sets `must_stop`, so that all ranks stop at the next `barrier_or_stop`."""
        if self.watchdog is not None:
            with contextlib.suppress(RuntimeError):  # the store has ended: the next one reports it
                if self.must_stop:
                    self.watchdog.request_stop()
                self.must_stop |= self.watchdog.is_stop_requested()
        return self.must_stop

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            self.complete(lambda: dist.all_reduce(tensor, async_op=True))
        return tensor

    def broadcast_(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy the tensor of rank `source` into that of all ranks, in place."""
        if self.world_size > 1:
            self.complete(lambda: dist.broadcast(tensor.detach(), source, async_op=True))
        return tensor

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Stack equally shaped numeric arrays of all ranks: [world_size, ...]."""
        if self.world_size == 1:
            return array[None].copy()
        if self.shared is not None:
            with self.watch():
                return self.shared.all_gather(array)
        local = torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        everyone = local.new_empty(self.world_size * local.numel())
        self.complete(lambda: all_gather(everyone, local.reshape(-1), async_op=True))
        return everyone.cpu().numpy().reshape(self.world_size, *array.shape)

    def gather_ragged(self, array: np.ndarray) -> list[np.ndarray]:
        """Return one-dimensional arrays of any lengths from all ranks, by rank (not pickled)."""
        sizes = self.all_gather(np.array([len(array)]))[:, 0]
        padded = np.zeros(max(int(sizes.max()), 1), array.dtype)
        padded[: len(array)] = array
        return [row[:size] for row, size in zip(self.all_gather(padded), sizes, strict=True)]

    def gather_text(self, text: str) -> list[str]:
        encoded = np.frombuffer(escape(text).encode(), np.uint8)
        return [row.tobytes().decode() for row in self.gather_ragged(encoded)]

    def run_on_rank0(self, find: Callable[[], Any]) -> Any:
        """Call `find` on rank 0; return its result (JSON) or raise its InputError on all ranks."""
        answer = {}
        if self.is_main:
            try:
                answer = {"value": find()}
            except InputError as error:
                answer = {"error": str(error)}
        answer = json.loads(self.gather_text(json.dumps(answer))[0])
        if "error" in answer:
            raise InputError(answer["error"])
        return answer["value"]

    def complete(self, start: Callable[[], dist.Work]) -> None:
        """Start a collective with async_op=True and wait for its end; a missing rank is named."""
        with self.watch() as deadline:
            work, nap_s = start(), 1e-5
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no answer for {self.timeout_s:g} s")
                if self.must_stop:
                    self.watchdog.request_stop()
                time.sleep(nap_s)
                nap_s = min(1.5 * nap_s, MAX_NAP_S)
            # complete: raises if it failed, and orders the CUDA stream behind the collective
            work.wait()

    @contextlib.contextmanager
    def watch(self) -> Iterator[float]:
        """Name a missing rank if a collective fails, also one of another library.

        Yields the end of the time-out, which other libraries enforce by themselves."""
        deadline = time.monotonic() + self.timeout_s
        if self.world_size > 1:
            self.watchdog.enter(self.activity)
        try:
            yield deadline
        except OWN_ERRORS:
            raise
        except RuntimeError as error:  # gloo: a rank has left, or its own time-out
            if self.world_size == 1:
                raise
            self.watchdog.fail(self.activity, one_line(error), deadline)


def one_line(error: Exception) -> str:
    """Return the message of a failed collective, without its place in the sources."""
    return str(error).splitlines()[0].rsplit("] ")[-1].split(". ")[0]


def find_device(device: str) -> torch.device:
    """Return the device of this rank for `model.device`; make a GPU the current one.

    Raises InputError if a GPU is requested and cannot be used, or for more ranks than GPUs."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if device == "cuda":
            raise InputError(f"model.device: cuda, but {why_no_gpu()}; or set cpu")
        if local_rank == 0 and cuda_of_driver() is not None:
            log(f"warning: running on the CPU: {why_no_gpu()}")
        return torch.device("cpu")
    if max(local_rank + 1, local_world_size) > torch.cuda.device_count():
        raise InputError(
            f"--nproc_per_node: {local_world_size} ranks, but only {torch.cuda.device_count()} "
            "GPUs; each rank needs its own"
        )
    set_cuda_defaults()
    target = torch.device("cuda", local_rank)
    torch.cuda.set_device(target)
    return target


def why_no_gpu() -> str:
    """Return what keeps torch from using a GPU, and what to install or set."""
    driver, build = cuda_of_driver(), torch.version.cuda
    if build is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with CUDA"
    if driver is None:
        return "there is no NVIDIA driver (libcuda.so.1); install it, in Docker run with --gpus all"
    major = int(build.split(".")[0])
    if driver[0] < major:
        oldest = OLDEST_DRIVER.get(major)
        needed = f"driver {oldest} or newer" if oldest else "a newer driver"
        return (
            f"the NVIDIA driver is too old: it supports CUDA up to {driver[0]}.{driver[1]}; torch "
            f"{torch.__version__} is built for {build}; install {needed}, or a build of torch for "
            f"CUDA {driver[0]}"
        )
    advice = "check nvidia-smi and CUDA_VISIBLE_DEVICES, in Docker run with --gpus all"
    return f"torch finds no GPU; {advice}"


def cuda_of_driver() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver runs; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # none, or something else of that name
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def set_cuda_defaults() -> None:
    """Change defaults of torch and NCCL before both start, where no variable is set."""
    # Training leaves memory in pieces, and keys and values are large. A call instead of the
    # variable, as torch may read that while it is imported.
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    # Registration of the buffers of captured sums exchanges addresses between ranks during the
    # capture, and in some versions covers only the first piece of an expandable segment.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    # A product of few rows, as in decoding, is split, and by default adds its parts in bfloat16: it
    # would round more coarsely than the same product in training.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def check_interface(backend: str) -> None:
    """Raise InputError if the backend's variable names no network interface that has an address."""
    import psutil

    variable, families = f"{backend.upper()}_SOCKET_IFNAME", (socket.AF_INET, socket.AF_INET6)
    value = os.environ.get(variable, "")
    if not value or value.startswith("^"):  # NCCL leaves those out
        return
    found = psutil.net_if_addrs().items()
    usable = [name for name, given in found if any(a.family in families for a in given)]
    # Gloo opens every one. NCCL needs one, and without = takes beginnings of names.
    needs, compare = (all, str.__eq__) if backend == "gloo" else (any, str.startswith)
    if value.startswith("="):
        compare = str.__eq__
    names = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    if not needs(any(compare(there, name) for there in usable) for name in names):
        here = ", ".join(usable) or "none"
        raise InputError(f"{variable}: no network interface {value} has an address; here: {here}")


@contextlib.contextmanager
def ranks_from_environment(device: str, timeout_s: float) -> Iterator[Ranks]:
    """Join the process group that torchrun describes in the environment; NCCL on GPUs, gloo on CPU.

    Raises InputError for a missing GPU, and RankTimeout if a rank does not join. Prints an EndsRun
    of the block; in a process group any exception of the block ends the process, see `leave`."""
    target = find_device(device)
    if "RANK" in os.environ:  # with torchrun
        die_with_parent()  # an orphan would keep writing to the files of the next run
        guard_forks()
        # Gloo's time-out raises in collectives that other libraries wait for. NCCL's watchdog would
        # end the process before `complete` has said why, so it comes last.
        backend, factor = ("nccl", 2) if target.type == "cuda" else ("gloo", 1)
        limit = timedelta(seconds=factor * timeout_s)
        check_interface(backend)
        store, rank, world_size = join_store()
        store.set_timeout(limit)
        try:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=limit
            )
        except RuntimeError as error:
            raise RankTimeout(f"a rank is missing at the start ({one_line(error)})") from error
    ranks, is_over = Ranks(target, timeout_s), threading.Event()
    if ranks.watchdog is not None:
        threading.Thread(target=ranks.watchdog.follow, args=(is_over,), daemon=True).start()
    try:
        yield ranks
        ranks.activity = "the end of the run"
        ranks.barrier()
        is_over.set()
        for free in ranks.before_end:
            free()
    except BaseException as error:
        end = error
        if not isinstance(error, EndsRun) and (problem := gpu_problem(error)) is not None:
            end = RunFailed(f"{ranks.activity}: {problem}")
        if dist.is_initialized():
            leave(end)
        if isinstance(end, EndsRun):
            log_once(end)
        if end is not error:
            raise end from error
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def signals_stop(ranks: Ranks) -> Iterator[None]:
    """Make STOP_SIGNALS set `ranks.must_stop`, so that a save runs to its end.

    Only a second Ctrl-C, at a rank or at torchrun, ends a rank at once. Signals that a parent has
    set to be ignored (nohup) stay ignored. Processes that the user's code forks have the handlers
    from before: `Pool.terminate` waits for a SIGTERM to end them."""
    first_ctrl_c: list[float] = []

    def note(number: int, frame) -> None:
        is_first, ranks.must_stop, ranks.signal = not ranks.must_stop, True, number
        # torchrun hands on a first Ctrl-C as SIGINT and a second one as SIGTERM.
        if number == signal.SIGINT or (number == signal.SIGTERM and first_ctrl_c):
            first_ctrl_c.append(time.monotonic())
            if first_ctrl_c[-1] - first_ctrl_c[0] > SAME_CTRL_C_S:
                raise Interrupt
        if is_first and ranks.is_interruptible:
            raise CallAbandoned

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handlers = {number: old for number, old in before.items() if old != signal.SIG_IGN}
    in_forks = guard_forks()
    in_forks.update(handlers)
    try:
        for number in handlers:
            signal.signal(number, note)
        with answers_at_once(ranks, set(handlers)):
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        in_forks.clear()


@contextlib.contextmanager
def answers_at_once(ranks: Ranks, numbers: set[int]) -> Iterator[None]:
    """Context in which rank 0 says at once what becomes of the first of these signals.

    A thread does so: the main one may be in a forward or backward pass for seconds."""
    if not ranks.is_main:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def answer() -> None:
        with open(reader, "rb", buffering=0) as file:
            while (number := file.read(1)) and number[0] not in numbers:
                pass
            if number:
                is_updating = ranks.activity.startswith("training")
                when = "after this update" if is_updating else "now"
                name, more = signal.Signals(number[0]).name, "a second Ctrl-C ends the run unsaved"
                log(f"{name}: stopping {when}, then saving; {more}")
            while file.read(64):
                pass

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join(1.0)  # a fork of the user's code may keep the pipe open
