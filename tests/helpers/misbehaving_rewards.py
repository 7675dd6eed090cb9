"""Reward functions that do what the completion says, for the tests of reward workers."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time

from bubblespec.rewards import per_sample


@per_sample
def obey(prompts, completions, completion_ids, **columns) -> list:
    """All completions of a call must be the same kind of text: a word and its argument."""
    return [value for text in completions for value in act(*text.partition(" ")[::2])]


@per_sample
def obey_left(prompts, completions, completion_ids, **columns) -> list:
    return obey(prompts, [text.split(" / ")[0] for text in completions], completion_ids)


@per_sample
def obey_right(prompts, completions, completion_ids, **columns) -> list:
    return obey(prompts, [text.split(" / ")[1] for text in completions], completion_ids)


def use_up(prompts, completions, completion_ids, words, nested, **columns) -> list[float]:
    """Return the sizes of all arguments, and empty them."""
    scores = []
    for prompt, ids, own, deep in zip(prompts, completion_ids, words, nested, strict=True):
        scores.append(float(len(prompt) + 10 * len(own) + 100 * len(deep["list"])))
        prompt.append({"role": "user", "content": "more"})
        own.clear()
        deep["list"].clear()
        ids.clear()
    return scores


@per_sample
def use_up_alone(**arguments) -> list[float]:
    """Do the same, but fail for several samples in one call."""
    scores = use_up(**arguments)
    if len(scores) > 1:
        raise ValueError("one at a time")
    return scores


def act(word: str, argument: str):
    if word == "value":
        return [float(argument)]
    if word == "none":
        return [None]
    if word == "raise":
        raise ZeroDivisionError(argument)
    if word == "exit":
        sys.exit(int(argument))
    if word == "interrupt":
        raise KeyboardInterrupt
    if word == "allocate":
        return [float(len(bytearray(1 << 60)))]
    if word == "wrong":
        return {"nan": [float("nan")], "two": [1.0, 2.0]}[argument]
    if word == "die":
        end_process(argument)
    if word == "hang":
        hang(argument)
    if word == "wait":  # for a file
        while not os.path.exists(argument):
            time.sleep(0.01)
        return [1.0]
    if word == "touch":
        open(argument, "w").close()
        return [2.0]
    if word == "leave":  # processes
        ways, path = argument.split()
        for how in ways.split("+"):
            leave(how, path)
        return [float(os.getpid())]
    if word == "say":
        os.system("echo to output; echo to error >&2")
        print("said", end="")
        return [1.0]
    if word == "report":
        facts = {
            "torch": "torch" in sys.modules,
            "threads": os.environ["OMP_NUM_THREADS"],
            "main thread": threading.current_thread() is threading.main_thread(),
            "hash": hash("a string") >> 16,
        }
        return [float(os.nice(0) if argument == "nice" else facts[argument])]
    raise ValueError(word)


def leave(how: str, path: str) -> None:
    """Start a process that stays, and wait until it has noted its number."""
    reader, writer = os.pipe()
    stay = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({path!r}, "a") as file:
    file.write(str(os.getpid()) + "\\n")
os.closerange(0, 256)
time.sleep(3600)
"""
    if how == "command":
        subprocess.Popen(
            [sys.executable, "-S", "-c", stay], pass_fds=[writer], start_new_session=True
        )
    elif os.fork() == 0:
        if how in ("setsid", "twice"):
            os.setsid()
        if how == "twice" and os.fork():
            os._exit(0)
        exec(stay)
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def end_process(how: str) -> None:
    if how == "exit code":
        os._exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "closed":
        os.closerange(3, 256)
    if how.startswith("orphan"):
        path = how.split()[1]
        if os.fork() == 0:
            note_pid(path)
            time.sleep(600)
        while not (os.path.exists(path) and os.path.getsize(path)):
            time.sleep(0.01)
        os._exit(4)


def hang(how: str) -> None:
    how, _, path = how.partition(" ")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "children":
        for _ in range(3):
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                break
    if path:
        note_pid(path)
    if how == "in-C":
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock for years
    while True:
        time.sleep(600)


def note_pid(path: str) -> None:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


def fails_for_some(prompts, completions, completion_ids, **columns) -> list[float]:
    """Return different rewards; raise for calls that have one in sixteen of the responses."""
    if any(sum(ids) % 16 == 0 for ids in completion_ids):
        raise ValueError("not this one")
    return [float(sum(ids) % 7) for ids in completion_ids]
