"""`python -m tests.rough_machine.stubbed ARGS`: the command line over stub ranks, clocks that jump.

With JUMPING_CLOCK set, `time.time()` of the harness goes back and forth by days at each call.
"""

import functools
import os
import random
import sys
import time


def main() -> int:
    """As `harness.__main__`, over stub ranks."""
    try:
        from harness.__main__ import secure_streams

        secure_streams()
        from harness import cli
        from harness.engine.local import LocalEngine
        from harness.runner import launch
    except KeyboardInterrupt:
        sys.stderr.write("harness: interrupted\n")
        return 2
    setattr(  # noqa: B010 - the class is replaced by what makes it
        launch, "LocalEngine",
        functools.partial(LocalEngine, entry="tests.rough_machine.ranks:rank_main"),
    )  # fmt: skip
    return cli.main()


if __name__ == "__main__":
    if os.environ.get("JUMPING_CLOCK"):
        _real, _rng = time.time, random.Random(5)
        setattr(time, "time", lambda: _real() + _rng.uniform(-1e6, 1e6))  # noqa: B010
    sys.exit(main())
