"""What a killed harness left half-written in a run folder: nobody reads it, nobody ends it.

    .NAME.PID.tmp    a file that was to be renamed into place (`disk.write_atomic`)
    .CASE.tmp/       a case that was being sealed (`store.RunFolder.seal_case`)

Below `runs` nothing is looked for: a run that was under way is set aside as a whole.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.store import RunFolder

_HALF_WRITTEN = re.compile(r"\..+\.(\d+)\.tmp")
_PLACES = (".", "report", "cases", "cases/*")


def clear_leftovers(folder: RunFolder) -> None:
    """Remove them; the folder is locked by the caller. A disk that refuses keeps them."""
    for path in list(_found(folder.path)):
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _found(root: Path) -> Iterator[Path]:
    yield from root.glob("cases/.*.tmp")
    for place in _PLACES:
        for path in root.glob(f"{place}/.*.tmp"):
            process = _HALF_WRITTEN.fullmatch(path.name)
            # Reports are made without the lock: their harness may be at it.
            if process and not Path("/proc", process[1]).exists():
                yield path
