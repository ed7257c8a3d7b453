"""The stub ranks, as a run has them that is started early: an entry, never imported by tests."""

import os
import signal
from pathlib import Path

from harness.engine.machine import wait_for_go
from harness.records import RunSpec
from tests.planted import clocked_ranks


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """As theirs; the stub "early" of a rank is what it does before it waits."""
    (folder / f".joined{rank}").write_text(str(os.getpid()))
    (folder / f".joined{rank}").rename(folder / f"joined{rank}")
    if spec.config["stub"].get("early") == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_go()
    return clocked_ranks.rank_main(spec, folder, rank, store_port)
