"""`python -m tests.killed_searches.stubbed ARGS`: the command line, over ranks without torch."""

import functools
import sys

from harness import cli
from harness.engine.local import LocalEngine
from harness.runner import launch

if __name__ == "__main__":
    setattr(  # noqa: B010 - the class is replaced by what makes it
        launch, "LocalEngine",
        functools.partial(LocalEngine, entry="tests.killed_searches.ranks:rank_main"),
    )  # fmt: skip
    sys.exit(cli.main())
