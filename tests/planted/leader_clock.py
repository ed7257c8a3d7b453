"""A leader's clock that a test puts ahead: limits end when it says, not by waiting for them.

How far ranks get within a second is the machine's affair. So limits are long, the test waits until
the ranks are where it wants them, and then lets the time pass in the file that `now_s` reads.
"""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from harness.engine import ranks as crew

AHEAD_FILE = "clock_ahead"


def install() -> None:
    """Have leaders that are forked from this process go by it."""
    setattr(crew, "time", SimpleNamespace(monotonic=now_s, time=time.time))  # noqa: B010 - a module's attribute


def now_s() -> float:
    """The machine's clock and what the run's folder, where its leader works, adds to it."""
    try:
        return time.monotonic() + float(Path(AHEAD_FILE).read_text())
    except FileNotFoundError:
        return time.monotonic()


def put_ahead(folder: Path, leader_pid: int, seconds: float) -> None:
    """Have the leader of the run in `folder` see, at once, that so many seconds have passed."""
    file = folder / AHEAD_FILE
    before_s = float(file.read_text()) if file.exists() else 0.0
    written = folder / f".{AHEAD_FILE}"
    written.write_text(str(before_s + seconds))
    written.replace(file)
    with suppress(ProcessLookupError):
        # It sleeps until its limit is over or a rank ends, which looks like this.
        os.kill(leader_pid, signal.SIGCHLD)
