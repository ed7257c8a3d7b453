"""Checkpoint folders: complete or absent, whatever dies when. Knows nothing of models.

    folder/
      step-00000010/              complete: only a rename gives a folder this name
        .metadata  __0_0.distcp   torch DCP's own
        checkpoint.json           what DCP has no place for, and a checksum of every file
      step-00000020.incomplete/   being written, or left by a crash: the next save removes it

A save writes and syncs every file of the incomplete folder, then the folder, and renames it once
all ranks are done. One run at a time saves into a folder.
"""

import contextlib
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

DOCUMENT = "checkpoint.json"
FORMAT = 1
_METADATA = ".metadata"
_COMPLETE = re.compile(r"step-(\d{8,})")
_BLOCK_BYTES = 1 << 22


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the rank and the cause."""


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints, in order; none if there is no such folder."""
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := _COMPLETE.fullmatch(name)))


def step_path(folder: Path, step: int) -> Path:
    """Where the complete checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


def find_step(folder: Path, step: int | None) -> Path:
    """The complete checkpoint of `step`, or the latest (`ValueError`: there is none)."""
    steps = complete_steps(folder)
    if not steps or (step is not None and step not in steps):
        wanted = "a complete checkpoint" if step is None else f"a complete checkpoint of {step=}"
        raise ValueError(f"Expected {wanted} in {folder}, got steps {steps}.")
    return step_path(folder, steps[-1] if step is None else step)


# --- reading ----------------------------------------------------------------------------------


def read_document(path: Path) -> dict[str, Any]:
    """What `StepWriter` was given to keep, of a complete checkpoint (`CheckpointError`: it is
    missing, damaged or of another format).
    """
    try:
        whole = json.loads((path / DOCUMENT).read_text())
        document, crc = whole["document"], whole["crc32"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / DOCUMENT} is missing or damaged: {error!r}") from error
    if zlib.crc32(json.dumps(document).encode()) != crc:
        raise CheckpointError(f"{path / DOCUMENT} is damaged: its checksum does not fit.")
    if document.get("format") != FORMAT:
        raise CheckpointError(f"Expected format {FORMAT} in {path}, got {document.get('format')}.")
    return dict(document)


def check_files(path: Path, document: dict[str, Any], share: int, num_shares: int) -> None:
    """Read every `num_shares`-th file and compare size and checksum (`CheckpointError`: a file is
    missing, cut short, or has other bytes than were written).
    """
    for name, (size, crc) in list(document["files"].items())[share::num_shares]:
        try:
            found = (path / name).stat().st_size
            if found != size:
                raise CheckpointError(f"Expected {size} bytes in {path / name}, got {found}.")
            found_crc = _crc_of(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error}") from error
        if found_crc != crc:
            raise CheckpointError(f"{path / name} is damaged: its checksum does not fit.")


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


# --- writing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FileSum:
    """Travels to the coordinator in the place of an item's storage data."""

    name: str
    size: int
    crc: int


class _SummedFile(io.BufferedWriter):
    """Sums what is written, and is on the disk once closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"), _BLOCK_BYTES)
        self.size = self.crc = 0

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self.size, self.crc = self.size + len(view), zlib.crc32(view, self.crc)
        return super().write(view)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()


class _SummedFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, _SummedFile] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with _SummedFile(Path(path)) as stream:
            self.written[Path(path).name] = stream
            yield stream


class StepWriter(FileSystemWriter):
    """DCP's file writer into an incomplete folder, which the coordinator makes complete at the end.
    `folder`: of all steps. `step`: names the checkpoint.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self.complete_path = step_path(folder, step)
        # Files sync themselves: DCP syncs .metadata before its last bytes left the buffer.
        incomplete = self.complete_path.with_name(f"{self.complete_path.name}.incomplete")
        super().__init__(incomplete, sync_files=False)
        self._files = self.fs = _SummedFiles()
        self._document: dict[str, Any] = {}

    def begin(self, document: dict[str, Any]) -> None:
        """On the coordinator, before anyone writes: remove what a crash left, make room
        (`ValueError`: the step exists).
        """
        self._document = document
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.complete_path.exists():
            raise ValueError(f"Expected a step not saved before, got {self.complete_path}.")
        for left_over in self._folder.glob("step-*.incomplete"):
            shutil.rmtree(left_over)
        Path(self.path).mkdir()
        _sync_folder(self._folder)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See `StorageWriter`; the results end with sums of this rank's files."""
        results = super().write_data(plan, planner).value()
        _sync_folder(Path(self.path))
        for name, file in self._files.written.items():
            note = _FileSum(name, file.size, file.crc)
            results.append(WriteResult(MetadataIndex(name), file.size, note))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once all ranks have written: complete the folder."""
        path = Path(self.path)
        flat = [result for part in results for result in part]
        sums = [r.storage_data for r in flat if isinstance(r.storage_data, _FileSum)]
        for file in sums:
            if not (path / file.name).is_file():
                raise CheckpointError(f"Expected a folder that all ranks share, got {path}.")
        items = [result for result in flat if not isinstance(result.storage_data, _FileSum)]
        super().finish(metadata, [items])
        files = {file.name: [file.size, file.crc] for file in sums}
        files[_METADATA] = [(path / _METADATA).stat().st_size, _crc_of(path / _METADATA)]
        document = self._document | {"format": FORMAT, "torch": torch.__version__, "files": files}
        text = json.dumps(document)
        with self._files.create_stream(path / DOCUMENT, "wb") as stream:
            whole = f'{{"crc32": {zlib.crc32(text.encode())}, "document": {text}}}'
            stream.write(whole.encode())
        _sync_folder(path)
        path.rename(self.complete_path)
        _sync_folder(self._folder)


def _sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
