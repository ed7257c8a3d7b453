"""What ranks tell each other of one capture where they cannot meet in a collective.

A rank whose capture failed leaves a note in the store of the default process group, so that those
who lose it inside of the capture learn why. It then waits for the others to reach the end of the
capture: one that stands in a collective which the failed function never issued will not.
"""

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_POLL_S = 0.02
_NOTE_CHARS = 1000


class CaptureNotes:
    """Notes of one capture; without a default process group there is nobody to write to.

    Every rank makes as many of these as the others, in one order. A few messages to the store each.
    """

    def __init__(self) -> None:
        self._store: Any = None
        if not dist.is_initialized():
            return
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store = distributed_c10d._get_default_store()
        number = self._store.add(f"captures of rank {self._rank}", 1)
        self._prefix = f"capture {number}: "

    def tell(self, refusal: str) -> None:
        """Leave a note of why this rank failed, if the store is still there."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            number = self._store.add(self._prefix + "failures", 1)
            note = f"{self._rank} {refusal[:_NOTE_CHARS]}"
            self._store.set(f"{self._prefix}failure {number}", note)

    def told(self) -> dict[int, str]:
        """Why ranks failed, the first one first; empty if the store is gone, too."""
        found: dict[int, str] = {}
        if self._store is None:
            return found
        with contextlib.suppress(RuntimeError):
            for number in range(1, self._store.add(self._prefix + "failures", 0) + 1):
                key = f"{self._prefix}failure {number}"
                if self._store.check([key]):
                    rank, _, refusal = self._store.get(key).decode(errors="replace").partition(" ")
                    found.setdefault(int(rank), refusal)
        return found

    def arrive(self) -> None:
        """This rank is at the end of its capture, well or not."""
        if self._store is not None:
            self._store.set(f"{self._prefix}rank {self._rank}", "")
            self._store.add(self._prefix + "arrived", 1)

    def missing(self, patience: timedelta) -> tuple[int, ...]:
        """Ranks that are not at the end after `patience`, or once another rank has left."""
        if self._store is None:
            return ()
        until_s = time.monotonic() + patience.total_seconds()
        while self._store.add(self._prefix + "arrived", 0) < self._world_size:
            if time.monotonic() > until_s or self.someone_left():
                keys = {rank: f"{self._prefix}rank {rank}" for rank in range(self._world_size)}
                return tuple(rank for rank, key in keys.items() if not self._store.check([key]))
            time.sleep(_POLL_S)
        return ()

    def leave(self) -> None:
        """Tell that this rank waits for nobody any more."""
        if self._store is not None:
            self._store.set(self._prefix + "left", "")

    def someone_left(self) -> bool:
        """Whether a rank waits for nobody any more: no collective of all ranks will end."""
        return self._store is not None and bool(self._store.check([self._prefix + "left"]))
