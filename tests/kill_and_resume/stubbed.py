"""`python -m tests.kill_and_resume.stubbed ARGS`: the command line, over ranks without torch.

With `KILLED_WITH_REPORTS` in the environment it makes its reports; without, whoever compares does.
"""

import functools
import os
import sys

from harness import cli
from harness.cli import report as report_commands
from harness.engine.local import LocalEngine
from harness.runner import launch

if __name__ == "__main__":
    setattr(  # noqa: B010 - the class is replaced by what makes it
        launch, "LocalEngine",
        functools.partial(LocalEngine, entry="tests.kill_and_resume.ranks:rank_main"),
    )  # fmt: skip
    if "KILLED_WITH_REPORTS" not in os.environ:
        # They take seconds.
        setattr(report_commands, "build_reports", lambda folder, *_: {})  # noqa: B010
    sys.exit(cli.main())
