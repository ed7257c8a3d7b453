"""Exit codes as `git bisect run` reads them, for `harness run` and `harness rerun`.

    ours                                       git's
    0 passed                                     0  good
    1 a check failed                             1  bad
    3 internal, 5 nothing ran, 6 no verdict    125  cannot say: skip this commit
    2 interrupted, 4 usage                   128 +  stop: the next commit would end the same

A commit on which nothing ran is no good one. One whose modules cannot be imported ends with 1
before any of this is read: let what git runs build first, or search by `harness bisect --commits`.
"""

from collections.abc import Sequence

import click

from harness.records import ExitCode

OPTION = "--bisect-exit"
CANNOT_SAY = 125
STOP = 128

bisect_exit = click.option(
    OPTION, is_flag=True, expose_value=False,
    help="Exit as git bisect run expects: 0 good, 1 bad, 125 skip, above 127 stop.",
)  # fmt: skip


def for_git(code: int, args: Sequence[str]) -> int:
    """The exit code of a command line: ours, or git's if that was asked for."""
    if OPTION not in args or code in (ExitCode.PASSED, ExitCode.FAILED):
        return int(code)
    stop = code in (ExitCode.INTERRUPTED, ExitCode.USAGE)
    return STOP + int(code) if stop else CANNOT_SAY
