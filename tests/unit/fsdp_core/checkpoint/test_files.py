"""Folders of checkpoints: complete or absent, on the disk before they count, damage found."""

import json
import os
import resource
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fsdp_core.checkpoint import CheckpointError, files, latest, load, save
from fsdp_core.checkpoint.files import DOCUMENT
from tests.unit.fsdp_core.checkpoint.small_models import bits, first_of, model_of, names, trained


def test_everything_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole files and their folder are synced before the rename, the parent folder after it."""
    synced: dict[str, int] = {}
    at_rename: dict[str, int] = {}
    fsync, rename = os.fsync, Path.rename

    def note_sync(handle: int) -> None:
        path = str(Path(f"/proc/self/fd/{handle}").readlink())
        synced[path.replace(".metadata.tmp", ".metadata")] = os.fstat(handle).st_size
        fsync(handle)

    def note_rename(path: Path, to: Path) -> Path:
        if to.name == "step-00000001":
            files = {str(p): p.stat().st_size for p in (path, *path.iterdir())}
            assert files == {name: synced[name] for name in files}
            at_rename.update(files)
            synced.clear()
        return rename(path, to)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    save(tmp_path, 1, *trained())
    assert len(at_rename) == 4
    assert str(tmp_path) in synced


def test_only_complete_checkpoints_are_seen(tmp_path: Path) -> None:
    """What a crash left is neither the latest nor loaded, and the next save removes it."""
    model = model_of()
    assert latest(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match=r"Expected a complete checkpoint in .*got steps \[\]"):
        load(tmp_path / "nowhere", model)
    save(tmp_path, 1, model)
    left = tmp_path / "step-00000007.incomplete"
    left.mkdir()
    (left / DOCUMENT).write_text("{}")
    (tmp_path / "step-notes").mkdir()
    assert latest(tmp_path) == 1
    assert load(tmp_path, model).step == 1
    with pytest.raises(ValueError, match=r"checkpoint of step=7 in .*got steps \[1\]"):
        load(tmp_path, model, step=7)
    save(tmp_path, 2, model)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-notes"]


def test_a_saved_step_is_not_overwritten(tmp_path: Path) -> None:
    """Saving a step again is refused, and the first stays as it is."""
    model = model_of()
    before = bits(model)
    save(tmp_path, 1, model)
    nn.init.zeros_(first_of(model))
    with pytest.raises(ValueError, match=r"Expected a step not saved before, got .*step-00000001"):
        save(tmp_path, 1, model)
    load(tmp_path, model)
    assert bits(model) == before


def test_a_full_disk_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails in the middle of a tensor says why it did."""
    monkeypatch.setattr(files, "_BLOCK_BYTES", 16)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"rank 0 with OSError: \[Errno 27\] File too large"
        ):
            save(tmp_path, 1, model_of())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert latest(tmp_path) is None


# --- damage -----------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", DOCUMENT])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_found_before_anything_is_changed(tmp_path: Path, damage: str, file: str) -> None:
    """A flipped bit, a lost end or a lost file is refused by the file's name."""
    model, optimizer = trained()
    path = save(tmp_path, 1, model, optimizer)
    DAMAGES[damage](path / file)
    nn.init.zeros_(first_of(model))
    before = bits(model, optimizer)
    message = f"bytes in .*{file}" if damage == "cut" and file != DOCUMENT else file
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model, optimizer)
    assert bits(model, optimizer) == before


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A document that says it is of another format is not read as this one."""
    path = save(tmp_path, 1, model_of())
    whole = json.loads((path / DOCUMENT).read_text())
    whole["document"]["format"] = 2
    whole["crc32"] = zlib.crc32(json.dumps(whole["document"]).encode())
    (path / DOCUMENT).write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=r"Expected format 1 in .*, got 2"):
        load(tmp_path, model_of())
