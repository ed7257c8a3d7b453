"""The real worker, but where a plant hangs a rank its run's time is up at once: an entry.

Without, whoever waits for the verdict of a hang waits for the whole limit of the run.
"""

import os
from pathlib import Path

from harness.records import RunSpec
from harness.worker import main, plants
from tests.planted import leader_clock

_real_wait_s = plants.wait_s
_folders: list[Path] = []


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """As the real one."""
    _folders.append(folder)
    return main.rank_main(spec, folder, rank, store_port)


def _wait_late(seconds: float) -> None:
    (folder,) = _folders
    leader_clock.put_ahead(folder, os.getppid(), 3600)
    _real_wait_s(seconds)


plants.wait_s = _wait_late
leader_clock.install()
