"""Start the ranks of a command, as torchrun does, but end with the last line that they print.

python -m bubblespec train --nproc-per-node 8 --config FILE [section.key=value ...]

torchrun's options may stand before --config. After an error or Ctrl-C its own log and traceback
would hide what the ranks have printed. After Ctrl-C the ranks have five minutes to save.
"""

import argparse
import logging
import signal
import socket
import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from bubblespec import progress
from bubblespec.distributed.failures import check_host
from bubblespec.distributed.processes import STOP_SIGNALS
from bubblespec.errors import InputError, RankTimeout, log, one_line
from bubblespec.tools import make_parser, refuse_dashes

SCRIPT = Path(__file__).parents[2] / "train.py"
SAVE_S = 300


def main(arguments: list[str]) -> None:
    """Run train.py on all ranks, see `run_ranks`."""
    parser = make_parser(
        "train",
        usage="%(prog)s [torchrun's options, such as --nproc-per-node 8] --config FILE "
        "[section.key=value ...]",
    )
    refuse_dashes(arguments)
    names = [argument.partition("=")[0] for argument in arguments]
    if "--config" not in names:
        parser.parse_known_args(arguments)  # --help
        parser.error("--config is required")
    at = names.index("--config")
    if not (SCRIPT.exists() and "bubblespec" in SCRIPT.read_text(encoding="utf-8")):
        problem = f"{SCRIPT} does not exist, or is not of this package"
        raise InputError(f"{problem}; install bubblespec with pip install -e")
    options = parse_options([*arguments[:at], str(SCRIPT), *arguments[at:]], parser)
    if options.training_script != str(SCRIPT):
        parser.error(f"{options.training_script} must come after --config")
    run_ranks(options)


def run_command(name: str, arguments: list[str], num_ranks: int) -> None:
    """Run a command of this package on several ranks of this machine; see `run_ranks`."""
    given = [f"--nproc-per-node={num_ranks}", "--module", "bubblespec", name, *arguments]
    run_ranks(parse_options(given, make_parser(name)))


def parse_options(given: list[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse torchrun's options, a script and its arguments; errors are those of `parser`."""
    launcher = run.get_args_parser()
    signals = ",".join(number.name for number in (*STOP_SIGNALS, signal.SIGQUIT))
    launcher.set_defaults(shutdown_timeout=SAVE_S, signals_to_handle=signals)
    launcher.error = parser.error  # type: ignore[method-assign]  # without torchrun's long usage
    return launcher.parse_args(given)


def run_ranks(options: argparse.Namespace) -> None:
    """Run all ranks to their end. Exit with the code of the first that failed, or by a signal."""
    set_addresses(options)
    logging.disable(logging.ERROR)  # in this process, which does nothing but launch
    try:
        if run.determine_local_world_size(options.nproc_per_node) < 1:
            raise ValueError(f"--nproc-per-node {options.nproc_per_node} is less than 1")
        progress.end()
        run.run(options)
    except ChildFailedError as error:
        # torchrun ends the other ranks by SIGTERM, perhaps in the same second.
        rank, failure = min(
            error.failures.items(),
            key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp),
        )
        if failure.exitcode < 0:  # it could print nothing
            log(f"error: rank {rank} was killed by {failure.signal_name()}")
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)
    except SignalException as end:
        # Die of the signal as the ranks cannot, so that a shell ends its script or loop, too.
        signal.signal(end.sigval, signal.SIG_DFL)
        signal.raise_signal(end.sigval)
    except (AssertionError, OSError, ValueError) as error:
        raise InputError(f"the launcher's options are wrong: {one_line(error)}") from error
    except Exception as error:  # a port that is taken, or another node that does not come
        raise RankTimeout(f"the ranks could not be started: {one_line(error)}") from error


def set_addresses(options: argparse.Namespace) -> None:
    """Let the ranks of one machine meet on loopback; check the names of several machines.

    torch's agent would try for ever to connect to a name that has no address, its own included.
    Raises InputError."""
    if options.nnodes in ("1", "1:1") and not options.local_addr:
        options.local_addr = "127.0.0.1"
    endpoint = options.rdzv_endpoint.rpartition(":")[0].strip("[]") or options.rdzv_endpoint
    check_host("--rdzv-endpoint", endpoint or "localhost")
    check_host("--master-addr", options.master_addr)
    check_host("--local-addr", options.local_addr or socket.getfqdn())
