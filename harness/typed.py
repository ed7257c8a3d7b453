"""How the user started this harness: commands that a terminal shows can be typed as they stand.

    harness                on PATH; and wherever this was not started from a command line
    .venv/bin/harness      as it was typed, where PATH has another one, or none
    python -m harness      likewise, with the interpreter as it was typed

Files keep `harness`: they are read elsewhere.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "harness"


def program() -> str:
    """The words that start the harness, for a shell."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == NAME:
        words = sys.orig_argv
        if NAME in words and words[words.index(NAME) - 1] == "-m":
            return shlex.join(words[: words.index(NAME) + 1])
    found = shutil.which(NAME)
    if started.name != NAME or (found and os.path.realpath(found) == os.path.realpath(started)):
        return NAME
    return shlex.quote(sys.argv[0])


def typed(command: str) -> str:
    """A command that begins with `harness`, as the user would type it; other texts as they are."""
    return f"{program()}{command[len(NAME) :]}" if command.startswith(f"{NAME} ") else command
