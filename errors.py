"""Errors whose message is for the user: one line that says what was wrong, the value, and the remedy."""

import difflib


class ConfigError(ValueError):
    """A value the user gave cannot work."""


class DataError(ValueError):
    """Input, tokenizer or bin that cannot be used."""


class RunError(RuntimeError):
    """The run cannot go on."""


def nearest(name, known):
    """' (did you mean X?)' for the known name closest to `name`, else ''."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
