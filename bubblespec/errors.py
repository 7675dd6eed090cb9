"""The exceptions that end a run with a single line instead of a traceback."""


class InputError(ValueError):
    """Something the user gave is wrong: a configuration, a file, a model or a reward. The message says which, in one line."""

    is_said = False  # whether it has been printed, by this rank or by another that has one


class RunFailed(RuntimeError):
    """Training cannot usefully go on. The message says why, in one line, the same on all ranks."""
