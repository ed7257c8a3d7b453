"""Disks that are full or read-only, and folders that two harnesses want."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rough_machine.harness_process import run, scenario, start


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, so large; needs root.

    Raises:
        PermissionError: it cannot be mounted here.
    """
    place = folder / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        raise PermissionError(made.stderr.decode().strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, options: str) -> None:
    """Change the options of a small disk."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def full(folder: Path) -> list[str]:
    """A disk that fills up at several moments: one line, nothing lost, --resume goes on."""
    wrong = []
    for size_kib in (12, 48, *range(64, 321, 32)):
        here = folder / f"{size_kib}k"
        here.mkdir()
        with small_disk(here, f"{size_kib}k") as disk:
            code, out, err = run(
                "run", str(scenario(here)), "--out", str(disk / "run"), "--no-history", cwd=here
            )
            lines = [line for line in err.splitlines() if line.startswith("harness:")]
            if code not in (2, 6) or "Traceback" in out + err or not lines:
                wrong.append(f"{size_kib} KiB: exit code {code}: {(out + err)[-400:]}")
            if lines and "No space left" not in lines[0]:
                wrong.append(f"{size_kib} KiB: not told of the disk: {lines[0]}")
            remount(disk, "size=64m")
            if (disk / "run" / "manifest.json").exists():
                code, out, err = run("run", "--resume", str(disk / "run"), "--no-history", cwd=here)
            else:
                args = ("run", str(here / "rough.yaml"), "--out", str(disk / "run"))
                code, out, err = run(*args, "--no-history", cwd=here)
            if code:
                wrong.append(f"{size_kib} KiB: resumed with exit code {code}: {(out + err)[-400:]}")
    return wrong


def read_only(folder: Path) -> list[str]:
    """Output that cannot be written: one line; what is there can be read and checked."""
    wrong = []
    with small_disk(folder, "64m") as disk:
        run("run", str(scenario(folder)), "--out", str(disk / "run"), "--no-history", cwd=folder)
        remount(disk, "ro")
        for expected, args in (
            (6, ("run", str(folder / "rough.yaml"), "--out", str(disk / "other"))),
            (6, ("run", "--resume", str(disk / "run"))),
            (6, ("report", str(disk / "run"))),
            (0, ("check", str(disk / "run"))),
            (0, ("show", "dp2-seed1-attn", str(disk / "run"))),
        ):
            code, out, err = run(*args, cwd=folder)
            told = code == 0 or "Read-only file system" in err
            if code != expected or "Traceback" in out + err or not told:
                wrong.append(f"{args[0]}: exit code {code}: {(out + err)[-300:]}")
    return wrong


def two(folder: Path) -> list[str]:
    """The second harness on a folder is refused in one line, also by a live one after a kill."""
    wrong = []
    first = start(
        "run", str(scenario(folder, seeds=[1, 2, 3], steps=40)), "--out", "run", "--no-history",
        cwd=folder,
    )  # fmt: skip
    while not list(folder.glob("run/runs/*/rank0.jsonl")):
        if first.poll() is not None:
            return [f"the first ended with {first.returncode}"]
    for args in (("run", "--resume", "run"), ("run", "rough.yaml", "--out", "run")):
        code, out, err = run(*args, "--no-history", cwd=folder)
        if code != 4 or len(err.strip().splitlines()) != 1:
            wrong.append(f"second harness: exit code {code}: {(out + err)[-300:]}")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    code, out, err = run("run", "--resume", "run", "--no-history", cwd=folder)
    if code:
        wrong.append(f"after a kill -9 left its lock: exit code {code}: {(out + err)[-300:]}")
    return wrong
