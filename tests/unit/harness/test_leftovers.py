"""What a killed harness left half-written is gone after --resume, and nothing else is."""

import os
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.runner.retries import clear_leftovers
from harness.store import SHARDS_FILE, RunFolder


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    """Files of dead processes and half-sealed cases go; runs, whole files and files of the living
    stay, so do links' targets."""
    folder = RunFolder.create(tmp_path / "run", {}, "", [])
    for name in ("report", "cases/a/reference", "cases/.a.tmp/reference", "runs/k"):
        (folder.path / name).mkdir(parents=True)
    dead, living = 2**22 + 1, os.getpid()  # the first is no process: it is beyond pid_max
    gone = [f".verdict.json.{dead}.tmp", f"report/.index.html.{dead}.tmp",
            f"cases/a/.verdict.json.{dead}.tmp"]  # fmt: skip
    kept = [f"report/.report.md.{living}.tmp", f"runs/k/.node0.json.{dead}.tmp",
            "cases/a/case.json", ".mine.tmp"]  # fmt: skip
    for name in (*gone, *kept):
        (folder.path / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").touch()
    (folder.path / "cases/.b.tmp").symlink_to(tmp_path / "elsewhere")
    clear_leftovers(folder)
    assert not [name for name in gone if (folder.path / name).exists()]
    assert [name for name in kept if not (folder.path / name).exists()] == []
    assert {path.name for path in folder.path.glob("cases/*")} == {"a"}
    assert (tmp_path / "elsewhere/file").exists()


def test_a_folder_whose_harness_died_at_once_can_be_begun_again(tmp_path: Path) -> None:
    """Killed before the manifest, which comes last, it says what to do, and that then works."""
    with RunFolder.create(tmp_path / "run", {}, "", []) as folder:
        path = folder.path
    (path / "manifest.json").unlink()
    with pytest.raises(UsageError, match="start it once more, with --out"):
        RunFolder.open(path)
    RunFolder.create(path, {}, "", [])
    assert RunFolder.open(path).cases == ()


def test_what_belongs_to_a_folder_is_there_before_it_is_one(tmp_path: Path) -> None:
    """Whoever is killed as it is filled, a shard without its matrix say, leaves no run folder."""

    def killed(folder: RunFolder) -> None:
        (folder.path / SHARDS_FILE).touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunFolder.create(tmp_path / "run", {}, "", [], fill=killed)
    with pytest.raises(UsageError, match="start it once more, with --out"):
        RunFolder.open(tmp_path / "run")
    RunFolder.create(tmp_path / "run", {}, "", [])
