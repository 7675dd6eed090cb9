"""Reward functions that do what the completion says, for the tests of reward workers."""

import ctypes
import os
import re
import signal
import sys
import time


def obey(prompts, completions, completion_ids, **columns) -> list:
    """All completions of a call must be the same kind of text: a word and its argument."""
    return [value for text in completions for value in act(*text.partition(" ")[::2])]


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
    if word == "recurse":
        return act(word, argument)
    if word == "allocate":
        return [float(len(bytearray(1 << 60)))]
    if word == "wrong":
        return {"nan": [float("nan")], "inf": [float("inf")], "text": ["1.0"], "two": [1.0, 2.0], "none at all": []}[argument]
    if word == "die":
        end_process(argument)
    if word == "hang":
        hang(argument)
    if word == "sleep":
        time.sleep(float(argument.split()[0]))
        return [float(argument.split()[1])]
    if word == "wait":  # for a file
        while not os.path.exists(argument):
            time.sleep(0.01)
        return [1.0]
    if word == "touch":
        open(argument, "w").close()
        return [2.0]
    if word == "fork":  # and let the child return too
        os.fork()
        return [float(argument)]
    if word == "report":
        return [float({"torch": "torch" in sys.modules, "threads": os.environ["OMP_NUM_THREADS"]}[argument])]
    raise ValueError(word)


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
        if os.fork() == 0:
            note_pid(how.split()[1])
            time.sleep(600)
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


def crash_or_match(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """exact_match that ends its process for one prompt in four, and raises for another one."""
    values = []
    for text, wanted in zip(completions, answer, strict=True):
        kind = sum(map(ord, wanted)) % 4
        if kind == 0:
            os._exit(7)
        if kind == 1:
            raise ValueError(f"no answer to {wanted}")
        values.append(float(text.strip() == wanted))
    return values
