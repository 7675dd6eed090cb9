"""Reward functions that hang, crash, raise and lie, in processes of their own: each costs its
sample alone, and nothing is left.

Time-outs are long against what the well-behaved functions take, so that a busy machine does not
trip them.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bubblespec.dist import processes
from bubblespec.errors import InputError
from bubblespec.rewards import workers as reward_workers
from bubblespec.rewards.functions import Sample, call_one
from bubblespec.rewards.process import NICENESS
from bubblespec.rewards.workers import Answer, Kind, RewardWorkers, adaptive_timeout
from tests.helpers.checks import is_alive
from tests.helpers.clocks import ClockThatSkips
from tests.helpers.misbehaving_rewards import obey

OBEY = "tests.helpers.misbehaving_rewards.obey"
PATIENCE_S = 120.0  # for what must happen at some time


@pytest.fixture
def make_workers():
    """make_workers(paths, num_workers, timeout_s) -> RewardWorkers, closed at the end."""
    made = []

    def make(paths=(OBEY,), num_workers=1, timeout_s=PATIENCE_S, **options) -> RewardWorkers:
        made.append(RewardWorkers(list(paths), num_workers, timeout_s, **options))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def sample(text: str, **columns) -> Sample:
    return Sample("p", text, [1], columns)


def ask(workers: RewardWorkers, texts: list[str]) -> list[Answer]:
    for i, text in enumerate(texts):
        workers.submit(i, 0, sample(text))
    answers = dict(workers.collect())
    return [answers[i] for i in range(len(texts))]


def outcomes(workers: RewardWorkers, texts: list[str]) -> list:
    """Values, and kinds of failures."""
    return [
        answer.failure.kind if answer.failure else answer.value for answer in ask(workers, texts)
    ]


def eventually(condition) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pids_in(path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize(
    "bad, kind",
    [
        ("raise boom", "exception"),
        ("exit 0", "exception"),
        ("interrupt", "exception"),
        ("recurse", "exception"),
        ("allocate", "exception"),
        ("wrong nan", "value"),
        ("wrong inf", "value"),
        ("wrong text", "value"),
        ("wrong two", "value"),
        ("wrong none at all", "value"),
        ("die exit code", "crash"),
        ("die segfault", "crash"),
        ("die killed", "crash"),
        ("die closed", "crash"),
    ],
)
def test_a_failure_costs_its_sample_alone(make_workers, bad, kind):
    """First, in the middle and last; one worker, so that what comes after a crash needs its
    replacement."""
    texts = [bad, "value 0.1", "value 0.2", bad, bad, "value -3", "none", bad]
    assert outcomes(make_workers(), texts) == [kind, 0.1, 0.2, kind, kind, -3.0, None, kind]


@pytest.fixture
def clock(monkeypatch) -> ClockThatSkips:
    clock = ClockThatSkips()
    monkeypatch.setattr(reward_workers, "time", clock)
    return clock


def answers_after_time_out(
    workers: RewardWorkers, clock: ClockThatSkips, texts: list[str], is_hanging
) -> list[Answer]:
    """The clock is put forward by the time-out once `is_hanging`."""
    for i, text in enumerate(texts):
        workers.submit(i, 0, sample(text))
    assert eventually(is_hanging)
    clock.skipped += workers.timeout_s
    answers = dict(workers.collect())
    return [answers[i] for i in range(len(texts))]


def test_what_hangs_is_killed_with_its_children(make_workers, clock, tmp_path):
    """It ignores SIGTERM, is stuck in C, or has children: all have ended at the time-out, and the
    rest is scored."""
    notes = {how: tmp_path / how for how in ("sleeping", "in-C", "children")}
    texts = [f"hang {how} {path}" for how, path in notes.items()] + [
        f"value {number}" for number in range(3)
    ]
    answers = answers_after_time_out(
        make_workers(num_workers=3, timeout_s=900.0),
        clock,
        texts,
        lambda: [len(pids_in(path)) for path in notes.values()] == [1, 1, 4],
    )
    assert [a.failure.kind for a in answers[:3]] == ["timeout"] * 3 and [
        a.value for a in answers[3:]
    ] == [0.0, 1.0, 2.0]
    assert "no answer within 900 s" in str(answers[0].failure)
    assert not any(is_alive(pid) for path in notes.values() for pid in pids_in(path))


def test_a_crash_is_found_while_an_orphan_holds_the_connection(make_workers, tmp_path):
    path = tmp_path / "orphan"
    answers = ask(make_workers(timeout_s=PATIENCE_S), [f"die orphan {path}", "value 1"])
    assert (
        answers[0].failure.kind == "crash"
        and "exit code 4" in str(answers[0].failure)
        and answers[1].value == 1.0
    )
    assert len(pids_in(path)) == 1 and not is_alive(*pids_in(path))


def test_failures_say_what_happened(make_workers):
    texts = ["raise first\nsecond", "die segfault", "die killed", "die exit code", "wrong inf"]
    failures = [answer.failure for answer in ask(make_workers(), texts)]
    assert "raised ZeroDivisionError at " in failures[0].message and failures[0].message.endswith(
        "first second"
    )
    assert "in act" in failures[0].trace and failures[0].trace.rstrip().endswith("second")
    assert (
        "SIGSEGV" in failures[1].message
        and "SIGKILL" in failures[2].message
        and "exit code 3" in failures[3].message
    )
    assert failures[4].message == "value inf is not finite"


def test_a_child_that_returns_from_the_function_answers_nothing(make_workers):
    workers = make_workers()
    for round_number in range(3):
        assert outcomes(workers, [f"fork {n}" for n in range(4)]) == [0.0, 1.0, 2.0, 3.0], (
            round_number
        )


@pytest.mark.parametrize("num_workers", [1, 3])
def test_values_are_those_of_a_call_in_this_process(make_workers, num_workers):
    texts = [f"value {1 / (n + 1)!r}" for n in range(40)] + ["none", "raise x", "wrong nan"]
    wanted = [call_one(obey, sample(text)) for text in texts]
    found = ask(make_workers(num_workers=num_workers), texts)
    assert [a.value for a in found[:-2]] == wanted[:-2]
    assert [str(a.failure) for a in found[-2:]] == [str(failure) for failure in wanted[-2:]]


def test_workers_take_work_as_they_are_free(make_workers, tmp_path):
    """The first sample waits for what the last one does: with two workers the others do not queue
    behind it."""
    path = tmp_path / "mark"
    texts = [f"wait {path}", *[f"value {n}" for n in range(10)], f"touch {path}"]
    assert outcomes(make_workers(num_workers=2, timeout_s=PATIENCE_S), texts) == [
        1.0,
        *map(float, range(10)),
        2.0,
    ]


def test_workers_are_light_and_single_threaded(make_workers):
    assert outcomes(make_workers(), ["report torch", "report threads"]) == [0.0, 1.0]


def test_workers_give_way_to_ranks_that_decode(make_workers):
    """Also where Linux shares the cores among sessions first, which a new session shows: this one
    may be older than that."""
    nice, nice_session = outcomes(make_workers(), ["report nice", "report nice session"])
    assert nice == min(os.nice(0) + NICENESS, 19)
    report = (
        "from tests.helpers.misbehaving_rewards import session_niceness; print(session_niceness())"
    )
    done = subprocess.run(
        [sys.executable, "-c", report],
        start_new_session=True,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert nice_session == (None if done.stdout.strip() == "None" else NICENESS)


def test_the_order_of_sets_is_that_of_one_seed_in_all_workers(make_workers, monkeypatch):
    """Strings hash in them as they do under PYTHONHASHSEED=0, whatever the trainer's seed is."""
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    command = [sys.executable, "-c", "print(hash('a string') >> 16)"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcomes(make_workers(), ["report hash"]) == [float(done.stdout)]


def test_columns_chats_and_several_functions(make_workers):
    paths = ["bubblespec.rewards.exact_match", "bubblespec.rewards.answer_format"]
    workers = make_workers(paths)
    text = "<answer>4</answer>"
    for key, prompt in (("text", "p"), ("chat", [{"role": "user", "content": "p"}])):
        for function in (0, 1):
            workers.submit(
                (key, function),
                function,
                Sample(prompt, text, [1, 2], {"answer": "4", "level": None}),
            )
    assert {key: answer.value for key, answer in workers.collect()} == {
        (k, f): 1.0 for k in ("text", "chat") for f in (0, 1)
    }


def test_a_function_that_a_worker_cannot_import_ends_the_run(make_workers):
    workers = make_workers(["no_such_module.f"])
    workers.submit(0, 0, sample("value 1"))
    for _ in range(2):
        with pytest.raises(InputError, match=r"reward.functions: .*no_such_module"):
            list(workers.collect())


def test_columns_that_cannot_be_sent_are_named(make_workers):
    with pytest.raises(InputError, match=r"reward.num_workers: .*give 0"):
        make_workers().submit(0, 0, sample("value 1", column=lambda: 0))


def test_huge_numbers_have_a_limit_of_their_own(make_workers):
    """math-verify's limits are signals, which only a main thread gets."""
    workers = make_workers(["bubblespec.rewards.math_equivalence"], timeout_s=PATIENCE_S)
    for key, text in enumerate(["<answer>9^{9^{9}}</answer>", "<answer>0.5</answer>"]):
        workers.submit(key, 0, sample(text, answer="1/2"))
    assert {key: (answer.value, answer.failure) for key, answer in workers.collect()} == {
        0: (0.0, None),
        1: (1.0, None),
    }


# The adaptive time-out


@pytest.mark.parametrize(
    "slowest, wanted",
    [
        (None, 30.0),
        (0.0, 2.0),
        (1.0, 2.0),
        (4 / 3, 2.0),
        (2.0, 3.0),
        (10.0, 15.0),
        (20.0, 30.0),
        (99.0, 30.0),
    ],
)
def test_adaptive_timeout_is_rollpackers(slowest, wanted):
    assert adaptive_timeout(slowest) == pytest.approx(wanted)


@pytest.fixture
def ask_in(make_workers, monkeypatch):
    """ask_in(workers, text, seconds, task) -> seconds that a worker was given for it. How long it
    took is made up: `seconds`."""
    limits, answer_s, ask_worker = [], [], reward_workers._Worker.ask

    def ask_and_note(worker, work: bytes, limit_s: float) -> Answer:
        limits.append(limit_s)
        return ask_worker(worker, work, PATIENCE_S)._replace(seconds=answer_s.pop())

    monkeypatch.setattr(reward_workers._Worker, "ask", ask_and_note)

    def run(workers: RewardWorkers, text: str, seconds: float, task=None) -> float:
        answer_s.append(seconds)
        workers.submit(0, 0, sample(text) if task is None else sample(text, task=task))
        list(workers.collect())
        return limits[-1]

    return run


def test_adaptive_timeout_follows_correct_answers_but_not_the_first_of_a_worker(
    make_workers, ask_in
):
    workers, kind = make_workers(is_adaptive=True), Kind(0, None)
    for seconds, text, limit_s, next_limit_s in [
        (2.5, "value 1", 30, 30),  # it may have imported something
        (2.5, "value 0", 30, 30),
        (2.5, "value -1", 30, 30),
        (2.5, "raise x", 30, 30),
        (0.01, "value 1", 30, 2),
        (1.5, "value 0.5", 2, 2.25),
        (0.01, "value 1", 2.25, 2.25),
        (60, "value 1", 2.25, 30),
    ]:
        assert (
            ask_in(workers, text, seconds) == limit_s
            and workers.limit_s(kind, is_first=False) == next_limit_s
        ), text
        assert workers.limit_s(kind, is_first=True) == 30
    assert make_workers(timeout_s=1.5, is_adaptive=True).limit_s(kind, is_first=False) == 1.5
    assert make_workers(timeout_s=77.0).limit_s(kind, is_first=False) == 77.0


def test_adaptive_timeout_is_each_tasks_own(make_workers, ask_in):
    """By the column `task`; samples without one share theirs. A worker's first call for each has
    the longest limit."""
    workers = make_workers(is_adaptive=True)
    for task in ("sums", "proofs", None, 7):
        assert ask_in(workers, "value 1", 50, task) == 30
        assert ask_in(workers, "value 1", 0.1, task) == 30
        assert ask_in(workers, "value 0", 0.1, task) == 2
    assert ask_in(workers, "value 1", 10, "proofs") == 2
    assert ask_in(workers, "value 1", 4, None) == 2
    for task, limit_s in [("sums", 2), ("proofs", 15), (None, 6), (7, 2)]:
        assert ask_in(workers, "value 0", 0.1, task) == limit_s


def test_adaptive_timeout_is_each_functions_own(make_workers, ask_in):
    workers = make_workers([OBEY, OBEY], is_adaptive=True)
    for _ in range(2):
        ask_in(workers, "value 1", 3, "sums")
    assert (
        workers.limit_s(Kind(0, "sums"), is_first=False) == 4.5
        and workers.limit_s(Kind(1, "sums"), is_first=False) == 30
    )


def test_seconds_are_those_in_the_function(make_workers):
    begin_s = time.monotonic()
    (answer,) = ask(make_workers(), ["sleep 0.25 1"])
    assert answer.value == 1.0 and answer.seconds >= 0.25
    assert begin_s < answer.ended_s - answer.seconds < answer.ended_s < time.monotonic()


# Answers as they come


def test_take_gives_each_answer_once_and_never_waits(make_workers, tmp_path):
    """What is not taken, `collect` gives."""
    mark = tmp_path / "mark"
    workers = make_workers()
    assert workers.take() == []
    for key, text in enumerate(["value 1", "raise x", f"wait {mark}", "value 3"]):
        workers.submit(key, 0, sample(text))
    taken = []
    assert eventually(lambda: taken.extend(workers.take()) or len(taken) == 2)
    assert [(key, answer.value) for key, answer in taken] == [(0, 1.0), (1, None)] and taken[1][
        1
    ].failure.kind == "exception"
    assert workers.take() == []
    mark.touch()
    assert {key: answer.value for key, answer in workers.collect()} == {2: 1.0, 3: 3.0}
    assert workers.take() == [] and list(workers.collect()) == []


def test_take_leaves_errors_that_end_the_run_to_collect(make_workers):
    workers = make_workers(["no_such_module.f"])
    workers.submit(0, 0, sample("value 1"))
    assert eventually(lambda: workers._answers.qsize())
    for _ in range(2):
        assert workers.take() == []
        with pytest.raises(InputError, match=r"reward.functions: .*no_such_module"):
            list(workers.collect())


def test_take_gives_nothing_of_a_batch_that_was_given_up(make_workers, tmp_path):
    mark = tmp_path / "mark"
    workers = make_workers()
    for key, text in enumerate([f"wait {mark}", "value 1"]):
        workers.submit(key, 0, sample(text))
    assert list(workers.collect(lambda: True)) == []
    workers.submit(7, 0, sample("value 2"))
    mark.touch()
    taken = []
    assert eventually(lambda: taken.extend(workers.take()) or taken)
    assert [(key, answer.value) for key, answer in taken] == [(7, 2.0)]
    assert list(workers.collect()) == []


# What functions print


def test_what_is_printed_is_shown_up_to_a_limit_and_counted(make_workers, capfd):
    """100 MB in a call, by the function and by what it starts, on both streams: the batch has its
    reward, and the next batch has its own room."""
    workers, size = make_workers(), 100_000_000
    assert outcomes(workers, [f"print {size}", "say"]) == [float(size), 1.0]
    limit = reward_workers.MOST_SHOWN
    left_out = size + len("to output\nto error\nsaid") - limit
    line = f"warning: {left_out} bytes that reward functions printed are left out; {limit} of each batch are shown"
    shown, said = capfd.readouterr()
    assert (
        said == f"{line}\n"
        and len(shown) == limit + 1
        and set(shown[:-1]) == {"x"}
        and shown.endswith("\n")
    )
    assert outcomes(workers, ["say"]) == [1.0]
    assert capfd.readouterr() == ("to output\nsaid", "to error\n")


def test_what_nobody_reads_is_not_waited_for(make_workers, capfd):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    room = 0
    while True:
        try:
            room += os.write(writer, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writer, True)
    workers = make_workers(num_workers=0)
    workers.show(writer, b"y" * 5000)
    assert len(os.read(reader, room + 1)) == room
    workers.show(writer, b"z" * 5000)
    assert os.read(reader, room + 1) == b"z" * 5000
    os.close(reader)
    workers.show(writer, b"lost")
    os.close(writer)
    workers.close()
    assert "warning: 5004 bytes that" in capfd.readouterr().err


# Nothing is left

WAYS = ("fork", "setsid", "twice", "command")


@pytest.mark.parametrize("end", ["hang sleeping", "die exit code", "close"])
def test_what_detaches_itself_ends_with_its_worker(make_workers, clock, tmp_path, end):
    """It leaves the process group, the session, or its parent, and ignores SIGTERM."""
    path, mark = tmp_path / "pids", tmp_path / "mark"
    workers = make_workers(timeout_s=900.0)
    # With one worker: all that are left by the function's first call may stay.
    texts = [f"leave {'+'.join(WAYS)} {path}"]
    assert ask(workers, texts)[0].failure is None
    assert len(pids_in(path)) == len(WAYS) and all(is_alive(pid) for pid in pids_in(path))
    if end == "close":
        workers.close()
    elif end.startswith("hang"):
        (answer,) = answers_after_time_out(workers, clock, [f"{end} {mark}"], lambda: pids_in(mark))
        assert answer.failure.kind == "timeout"
    else:
        assert outcomes(workers, [end]) == ["crash"]
    assert not any(is_alive(pid) for pid in pids_in(path))


@pytest.mark.parametrize("how", WAYS)
def test_what_calls_leave_does_not_pile_up(make_workers, tmp_path, capfd, how):
    """What the first call has left may stay. A call that leaves more ends its worker with all of
    it."""
    path = tmp_path / "pids"
    workers = make_workers()
    for round_number in range(3):
        (first,) = outcomes(workers, [f"leave {how} {path}"])
        assert [is_alive(pid) for pid in pids_in(path)] == [False] * (2 * round_number) + [True]
        assert outcomes(workers, ["value 1"]) == [1.0]
        assert outcomes(workers, [f"leave {how} {path}"]) == [first], "the same worker"
        assert len(pids_in(path)) == 2 * round_number + 2
        assert eventually(lambda: not any(is_alive(pid) for pid in pids_in(path)))
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(said) == 1 and said[0].startswith(
        f"warning: reward {OBEY}: a call has left processes behind; "
    )


def test_a_pool_may_be_kept_from_call_to_call(make_workers, capfd):
    (worker,) = set(outcomes(make_workers(), ["pool"] * 10))
    assert worker > 0 and "warning" not in capfd.readouterr().err


def test_close_ends_workers_at_work_and_idle_ones(make_workers, tmp_path):
    path = tmp_path / "pids"
    workers = make_workers(num_workers=3, timeout_s=3600.0)
    for key, how in enumerate(("in-C", "children")):
        workers.submit(key, 0, sample(f"hang {how} {path}"))
    assert eventually(lambda: len(pids_in(path)) == 5)
    processes = [worker.process for worker in workers._workers]
    workers.close()
    assert processes and all(process.returncode is not None for process in processes)
    assert not any(is_alive(pid) for pid in pids_in(path))
    workers.close()


SCRIPT = f"""
import os, sys, time
from bubblespec.rewards.workers import RewardWorkers
from bubblespec.rewards.functions import Sample
workers = RewardWorkers(["{OBEY}"], 3, 3600.0)
for number, text in enumerate(("leave {"+".join(WAYS)} ", "hang in-C ", "hang sleeping ")):
    workers.submit(number, 0, Sample("p", text + sys.argv[1], [1], {{}}))
while len(workers._workers) < 3:
    time.sleep(0.01)
print(*[worker.process.pid for worker in workers._workers], flush=True)
time.sleep(3600)
"""


def test_workers_die_with_a_trainer_that_is_killed(tmp_path):
    path = tmp_path / "pids"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        keepers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(keepers) == 3 and eventually(lambda: len(pids_in(path)) == 2 + len(WAYS))
        pids = [*keepers, *pids_in(path)]
        assert all(is_alive(pid) for pid in pids)
        trainer.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(is_alive(pid) for pid in pids))


def test_interpreter_ends_while_workers_hang(tmp_path):
    """An error in the trainer must reach the end of its process."""
    script = SCRIPT.replace("time.sleep(3600)", "raise SystemExit(5)")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "pids")], stdout=subprocess.PIPE, text=True
    ) as trainer:
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert trainer.wait(timeout=PATIENCE_S) == 5
    assert len(pids) == 3 and eventually(lambda: not any(is_alive(pid) for pid in pids))


assert os.path.exists("/proc/self/stat"), "these tests look for processes there"


def test_a_process_that_changes_its_parent_meanwhile_is_found(monkeypatch):
    """Its parent ends when the ancestor that adopts it has been read already, in the first reading
    or in the second."""
    for moves_at in (1, 2, 3, 4):  # before so many lists of children have been read
        reads = itertools.count(1)
        moved = {"keeper": ["worker", "orphan"], "worker": ["parent"]}
        before = {"keeper": ["worker"], "worker": ["parent"], "parent": ["orphan"]}
        has_moved = []

        def children_of(
            pid, reads=reads, before=before, moved=moved, has_moved=has_moved, moves_at=moves_at
        ):
            if next(reads) >= moves_at:
                has_moved.append(True)
            return list((moved if has_moved else before).get(pid, []))

        def state_of(pid, has_moved=has_moved):
            return ("Z" if pid == "parent" and has_moved else "S"), 0

        monkeypatch.setattr(processes, "children_of", children_of)
        monkeypatch.setattr(processes, "_state_of", state_of)
        assert sorted(processes.descendants_of("keeper")[0]) == ["orphan", "worker"], moves_at
