"""The exceptions that end a run with a single line instead of a traceback."""


class InputError(ValueError):
    """Something the user gave is wrong: a configuration, a file, a model or a reward. The message says which, in one line."""


class RunFailed(RuntimeError):
    """Training cannot usefully go on. The message says why, in one line, the same on all ranks."""
