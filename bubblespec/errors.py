"""The one exception that ends a run with a single line instead of a traceback."""


class InputError(ValueError):
    """Something the user gave is wrong: a configuration, a file, a model or a reward. The message says which, in one line."""
