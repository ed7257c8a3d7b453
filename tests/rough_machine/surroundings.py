"""Streams, variables, users and paths that a harness finds itself among, and each write refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import reports
from harness.records import ExitCode
from reports import html
from tests.damaged_folders import good
from tests.rough_machine.disks import small_disk
from tests.rough_machine.harness_process import ROOT, run, scenario, start
from tests.support.fake_engine import FakeEngine


def streams(folder: Path) -> list[str]:
    """A reader that leaves, closed streams, a full device: the exit code is that of the run."""
    wrong = []
    scenario(folder)
    for name, shell, expected in (
        ("head", "| head -1", 0),
        ("head of both", "2>&1 | head -1", 0),
        ("head of JSON", "--json | head -c 10", 0),
        ("nobody", "| true", 0),
        ("no stdout", ">&-", 0),
        ("no stderr", "2>&-", 0),
        ("nothing at all", "<&- >&- 2>&-", 0),
        ("full", "> /dev/full", 6),
    ):
        out = name.replace(" ", "-")
        command = f"set -o pipefail; exec 5<&0; $HARNESS run rough.yaml --no-history --out {out}"
        code, text = shell_run(f"{command} {shell}", folder)
        if code != expected or "Traceback" in text:
            wrong.append(f"{name}: exit code {code}, expected {expected}: {text[-400:]}")
        code, text = shell_run(f"$HARNESS run --resume {out} --no-history", folder)
        if code:
            wrong.append(f"{name}: resumed with exit code {code}: {text[-300:]}")
        code, text = shell_run(f"set -o pipefail; $HARNESS check {out} {shell}", folder)
        if code != expected:
            wrong.append(f"{name}: check ends with {code}: {text[-300:]}")
    for path in folder.glob("no*/runs/*/*"):
        # What a closed stream would have been may not be a file of ours.
        if path.suffix in (".json", ".jsonl") and b"dp2-seed" in path.read_bytes().split(b"{")[0]:
            wrong.append(f"{path}: has output in it")
    return wrong


def shell_run(command: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a shell's command, in which $HARNESS is one over stub ranks."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, timeout=240, check=False,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "HARNESS": f"{sys.executable} -m tests.rough_machine.stubbed"},
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def variables(folder: Path) -> list[str]:
    """No HOME, no TMPDIR, none of the usual ones: a run is made all the same."""
    wrong = []
    path = scenario(folder)
    for number, changes in enumerate(
        (
            {"HOME": "/nowhere", "TMPDIR": "/nowhere"},
            {"HOME": "", "TMPDIR": "", "PATH": ""},
            {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
            {"XDG_CACHE_HOME": "/proc/nowhere", "MPLCONFIGDIR": "/proc/nowhere"},
        )
    ):
        args = ("run", str(path), "--out", f"run{number}", "--no-history")
        code, out, err = run(*args, cwd=folder, env=changes)
        if code or "Traceback" in out + err:
            wrong.append(f"{changes}: exit code {code}: {(out + err)[-400:]}")
    process = start(
        "run", str(path), "--out", "bare", "--no-history", cwd=folder, bare=("HOME", "TMPDIR")
    )
    out, err = (text.decode(errors="replace") for text in process.communicate(timeout=240))
    if process.returncode:
        wrong.append(f"without HOME and TMPDIR: exit code {process.returncode}: {err[-400:]}")
    return wrong


def masks(folder: Path) -> list[str]:
    """Whatever umask: a run, or one line; as somebody whom modes bind, which root is not."""
    wrong = []
    for mask, expected in ((0o077, (0,)), (0o022, (0,)), (0o777, (6,)), (0o400, (6,))):
        here = folder / f"{mask:03o}"
        here.mkdir()
        path = scenario(here)
        process = start(
            "run", str(path), "--out", "run", "--no-history", cwd=here, umask=mask, through=BOUND
        )
        out, err = (text.decode(errors="replace") for text in process.communicate(timeout=240))
        lines = [line for line in err.splitlines() if line.startswith("harness:")]
        code = process.returncode
        told = code == 0 or (len(lines) == 1 and "ermission denied" in lines[0])
        if code not in expected or "Traceback" in out + err or not told:
            wrong.append(f"umask {mask:03o}: exit code {code}: {(out + err)[-400:]}")
        open_to_all = [
            p.name for p in here.glob("run/*") if mask == 0o077 and p.stat().st_mode & 63
        ]
        if open_to_all:
            wrong.append(f"umask 077: others may read {open_to_all}")
    return wrong


def paths(folder: Path) -> list[str]:
    """Names with spaces, line breaks and other scripts; too long ones; another file system."""
    wrong = []
    path = scenario(folder)
    for name in (
        "a b",
        "new\nline",
        "ünï-日本-🜁",
        "-dash",
        "'quote\"s'",
        "%d %s {x} [red]",
        "x" * 200,
    ):
        out = folder / name / "run"
        args = ("run", str(path), "--out", str(out), "--no-history")
        code, text, err = run(*args, cwd=folder)
        if code or "Traceback" in text + err:
            wrong.append(f"{name!r}: exit code {code}: {(text + err)[-400:]}")
        for command in (
            ("check", str(out)),
            ("report", str(out)),
            ("show", "dp2-seed1-attn", str(out)),
        ):
            code, text, err = run(*command, cwd=folder)
            if code:
                wrong.append(f"{name!r}: {command[0]}: exit code {code}: {(text + err)[-300:]}")
    for name in ("x" * 300, "/".join(["y" * 100] * 45), "nul/../" * 800 + "z"):
        code, text, err = run("run", str(path), "--out", name, "--no-history", cwd=folder)
        if code not in (4, 6) or len(err.strip().splitlines()) != 1 or "Traceback" in err:
            wrong.append(f"{name[:20]}...: exit code {code}: {(text + err)[-300:]}")
    with suppress(PermissionError), small_disk(folder, "64m") as disk:
        out = disk / "run"
        code, text, err = run("run", str(path), "--out", str(out), cwd=folder)
        again, _, told = run("merge", str(out), "--out", str(folder / "merged"), cwd=folder)
        if code or again:
            wrong.append(f"another disk: exit codes {code}, {again}: {(text + err + told)[-300:]}")
    return wrong


BOUND = ("setpriv", "--bounding-set=-dac_override,-dac_read_search",
         "--inh-caps=-dac_override,-dac_read_search")  # fmt: skip
CALLS = ("fsync", "mkdir", "link", "rename", "replace", "open")


class Refusing:
    """The disk refuses the call of a number, and none before or after."""

    def __init__(self, number: int) -> None:
        """Count what changes the disk."""
        self.left = number

    def wrap(self, name: str) -> Callable[..., Any]:
        """A call of `os` that may be the one."""
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            mine = name == "open" and not self._writes(*args)
            if not mine:
                self.left -= 1
                if self.left == 0:
                    raise OSError(28, "No space left on device", str(args[0]))
            return real(*args, **more)

        return call

    @staticmethod
    def _writes(path: Any, flags: int, *more: Any) -> bool:
        # A rank's own records are written by another process.
        return bool(flags & os.O_CREAT) and ".jsonl" not in str(path)


def each_write(folder: Path) -> list[str]:
    """The disk is full at each write in turn, and only at that: one line, and --resume ends it."""
    wrong: list[str] = []
    number = 0
    (folder / "s.yaml").write_text(good.SCENARIO)
    while True:
        number += 1
        out = folder / f"run{number}"
        refusing = Refusing(number)
        with ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, refusing.wrap(name)))
            code, text, err = good.harness(
                "run", str(folder / "s.yaml"), "--out", str(out), engine=FakeEngine(), build=built
            )
        if refusing.left > 0:
            return wrong if number > 50 else [*wrong, f"only {number} writes were seen"]
        lines = [line for line in err.splitlines() if line.startswith("harness:")]
        told = len(lines) == 1 and "No space left" in lines[0] if code else True
        if code not in (ExitCode.PASSED, ExitCode.NO_VERDICT) or "Traceback" in err or not told:
            wrong.append(f"write {number}: exit code {code}: {(text + err)[-300:]}")
        resumed = ("--resume", str(out)) if (out / "manifest.json").exists() else (
            str(folder / "s.yaml"), "--out", str(out)
        )  # fmt: skip
        code, text, err = good.harness("run", *resumed, engine=FakeEngine(), build=built)
        checked, told_then, _ = good.harness("check", str(out))
        if code or checked:
            wrong.append(f"write {number}: then {code}, {checked}: {err[-300:]}{told_then[-200:]}")


def built(folder: Path, *_: object) -> dict[str, Path]:
    """Reports without pictures."""
    with mock.patch.object(html, "MAX_DRAWN_CASES", 0):
        return reports.build(folder)
