"""Faults of the machine that a harness survives: disks, floods, clocks, signals, streams, users."""

import fcntl
import json
import os
import pty
import random
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import psutil
from rich.cells import cell_len

import reports
from harness.records import ExitCode
from reports import html
from tests.chaos import good
from tests.chaos.harness import ROOT, ended, run, scenario, start
from tests.chaos.ranks import (
    DATABASE_URL,
    FAIL_SEED,
    FLOOD_BYTES,
    FLOOD_SEED,
    FOUND,
    LAST_WORDS,
    SECRET_SEED,
    SECRETS,
)
from tests.support.fake_engine import FakeEngine

MAX_OUTPUT_BYTES = (64 << 20) + (1 << 20)
MAX_RESIDENT_KIB = 512 << 10
SHOWN = "dp2-seed1-attn"
BOUND = ("setpriv", "--bounding-set=-dac_override,-dac_read_search",
         "--inh-caps=-dac_override,-dac_read_search")  # fmt: skip
"""Starts a command as somebody whom modes bind, which root is not."""
Outcome = tuple[int, str, str]


def wrong(about: object, found: Outcome, *codes: int, says: str = "") -> Iterator[str]:
    """What is wrong with how a command ended: its code, a traceback, or a line that says why not.

    Args:
        about: which one.
        found: exit code, stdout, stderr.
        codes: that it may end with.
        says: in the one line of the harness, unless the code is 0.
    """
    code, out, err = found
    lines = [line for line in err.splitlines() if line.startswith("harness:")]
    told = not says or code == 0 or (bool(lines) and says in lines[0])
    if code not in (codes or (0,)) or "Traceback" in out + err or not told:
        yield f"{about}: exit code {code}: {(out + err)[-400:]}"


def new_run(path: Path, out: object = "run", **how: Any) -> Outcome:
    return run("run", str(path), "--out", str(out), "--no-history", **how)


def resumed(out: object, cwd: Path) -> Outcome:
    return run("run", "--resume", str(out), "--no-history", cwd=cwd)


# --- disks ------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, so large; needs root.

    Raises:
        PermissionError: it cannot be mounted here.
    """
    place = folder / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    made = subprocess.run(mount, capture_output=True)
    if made.returncode:
        raise PermissionError(made.stderr.decode().strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(place)], check=True)


def full_disk(folder: Path) -> Iterator[str]:
    """A disk that fills up at several moments: one line, nothing lost, --resume goes on."""
    for size_kib in (12, 48, *range(64, 321, 32)):
        here, about = folder / f"{size_kib}k", f"{size_kib} KiB"
        here.mkdir()
        with small_disk(here, f"{size_kib}k") as disk:
            path = scenario(here)
            yield from wrong(about, new_run(path, disk / "run", cwd=here), 2, 6, says="No space")
            remount(disk, "size=64m")
            again = (disk / "run" / "manifest.json").exists()
            found = resumed(disk / "run", here) if again else new_run(path, disk / "run", cwd=here)
            yield from wrong(f"{about}, resumed", found)


def read_only(folder: Path) -> Iterator[str]:
    """Output that cannot be written: one line; what is there can be read and checked."""
    with small_disk(folder, "64m") as disk:
        made, path = str(disk / "run"), scenario(folder)
        new_run(path, made, cwd=folder)
        remount(disk, "ro")
        for code, args in (
            (6, ("run", str(path), "--out", str(disk / "other"))), (6, ("run", "--resume", made)),
            (6, ("report", made)), (0, ("check", made)), (0, ("show", SHOWN, made)),
        ):  # fmt: skip
            yield from wrong(args[0], run(*args, cwd=folder), code, says="Read-only file system")


def two_harnesses(folder: Path) -> Iterator[str]:
    """The second harness on a folder is refused in one line, also by a live one after a kill."""
    path = scenario(folder, seeds=[1, 2, 3], steps=40)
    first = start("run", str(path), "--out", "run", "--no-history", cwd=folder)
    while not list(folder.glob("run/runs/*/rank0.jsonl")):
        if first.poll() is not None:
            yield f"the first ended with {first.returncode}"
            return
    for found in (resumed("run", folder), new_run(path, cwd=folder)):
        yield from wrong("second harness", found, 4, says="harness")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    yield from wrong("after a kill -9 left its lock", resumed("run", folder))


class Refusing:
    """The disk refuses the call of a number, and none before or after."""

    def __init__(self, number: int) -> None:
        """Count what changes the disk."""
        self.left = number

    def wrap(self, name: str) -> Callable[..., Any]:
        """A call of `os` that may be the one."""
        real = getattr(os, name)

        def call(*args: Any, **more: Any) -> Any:
            # A rank's own records are written by another process.
            if name != "open" or (args[1] & os.O_CREAT and ".jsonl" not in str(args[0])):
                self.left -= 1
                if self.left == 0:
                    raise OSError(28, "No space left on device", str(args[0]))
            return real(*args, **more)

        return call


def each_write(folder: Path) -> Iterator[str]:
    """The disk is full at each write in turn, and only at that: one line, and --resume ends it."""
    number, path = 0, folder / "s.yaml"
    path.write_text(good.SCENARIO)

    def again(*args: str) -> Outcome:
        return good.harness(*args, engine=FakeEngine(), build=without_pictures)

    while True:
        number += 1
        out, refusing = folder / f"run{number}", Refusing(number)
        with ExitStack() as stack:
            for name in ("fsync", "mkdir", "link", "rename", "replace", "open"):
                stack.enter_context(mock.patch.object(os, name, refusing.wrap(name)))
            found = again("run", str(path), "--out", str(out))
        if refusing.left > 0:
            if number <= 50:
                yield f"only {number} writes were seen"
            return
        codes = ExitCode.PASSED, ExitCode.NO_VERDICT
        yield from wrong(f"write {number}", found, *codes, says="No space left")
        begun = (out / "manifest.json").exists()
        found = again("run", *(("--resume", str(out)) if begun else (str(path), "--out", str(out))))
        yield from wrong(f"write {number}, resumed", found)
        yield from wrong(f"write {number}, checked", good.harness("check", str(out)))


def without_pictures(folder: Path, *_: object) -> dict[str, Path]:
    with mock.patch.object(html, "MAX_DRAWN_CASES", 0):
        return reports.build(folder)


# --- floods, secrets, clocks ------------------------------------------------------------------


def flood(folder: Path) -> Iterator[str]:
    """A rank that prints a GiB fills no disk and no memory; head and end are kept."""
    yield from wrong("flood", new_run(scenario(folder, seeds=[FLOOD_SEED]), cwd=folder))
    for output in folder.glob("run/runs/*/rank0.stderr"):
        text = output.read_bytes()
        if len(text) > MAX_OUTPUT_BYTES or not text.endswith(LAST_WORDS):
            yield f"{output.parent.name}: {len(text)} bytes of {FLOOD_BYTES}"
    resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if resident > MAX_RESIDENT_KIB:
        yield f"a process held {resident >> 10} MiB"


def secrets(folder: Path) -> Iterator[str]:
    """No byte that is written or printed holds a secret of variables, output, scenario or words."""
    token, failed = SECRETS["DEPLOY_TOKEN"], f"dp2-seed{FAIL_SEED}-attn"
    environ = SECRETS | {"DATABASE_URL": DATABASE_URL, "NCCL_DEBUG_FILE": f"/x/{token}"}
    place = folder / "scenarios"
    place.mkdir()
    path = scenario(place, seeds=[SECRET_SEED, FAIL_SEED])
    told = path.read_text().replace("not as it should", f"not as {token} should, {FOUND['github']}")
    path.write_text(told)
    places: dict[str, bytes] = {}
    for number, (code, args) in enumerate((
        (1, ("run", str(path), "--out", "run", "-k", f"attn or {token}")),
        (1, ("run", "--resume", "run")), (0, ("report", "run")), (1, ("check", "run", "--json")),
        (0, ("show", failed, "run")), (0, ("history", "--history", "history")),
        (1, ("rerun", failed, "run", "--out", "again")),
        (4, ("run", str(path), "--set", f"model.preset={token}")), (4, ("run", f"{token}.yaml")),
        (4, ("show", token, "run")),
    )):  # fmt: skip
        found = run(*args, cwd=folder, env=environ)
        places[f"{number} {args[0]}"] = (found[1] + found[2]).encode()
        if found[0] != code:
            yield f"{args[0]}: exit code {found[0]}: {(found[1] + found[2])[-300:]}"
    files = [each for each in folder.rglob("*") if each.is_file() and place not in each.parents]
    places |= {str(each.relative_to(folder)): each.read_bytes() for each in files}
    for name, value in (SECRETS | FOUND).items():
        forms = {value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value)}
        if at := [at for at, data in places.items() if any(f.encode() in data for f in forms)]:
            yield f"{name} is in {at}"
    if not any(b"connecting with ***" in data for data in places.values()):
        yield "nothing was masked: the ranks told no secret"
    if not any(name.startswith("history/") for name in places):
        yield f"no history among {sorted(places)}"


def clocks(folder: Path) -> Iterator[str]:
    """Clocks that jump by days at every look change no verdict and no limit."""
    env = {"JUMPING_CLOCK": "1"}
    yield from wrong("clocks", new_run(scenario(folder), cwd=folder, env=env))


# --- signals ----------------------------------------------------------------------------------


def signals(folder: Path) -> Iterator[str]:
    """Once or several times, at work: exit code 2, nobody left behind, --resume goes on."""
    once, hup, term = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
    for about, numbers in enumerate(([once], [once] * 2, [term], [hup], [hup, once, term])):
        here = folder / str(about)
        here.mkdir()
        path = scenario(here, steps=50)
        process = start("run", str(path), "--out", "run", "--no-history", cwd=here)
        while not list(here.glob("run/runs/*/rank0.jsonl")) and process.poll() is None:
            time.sleep(0.01)
        below = psutil.Process(process.pid).children(recursive=True)
        for number in numbers:
            process.send_signal(number)
        found = ended(process)
        yield from wrong(numbers, found, ExitCode.INTERRUPTED)
        if "--resume" not in found[2]:
            yield f"{numbers}: how to go on is not said: {found[2][-300:]}"
        if psutil.wait_procs(below, timeout=10)[1]:
            yield f"{numbers}: processes were left behind"
        yield from wrong(f"{numbers}, resumed", resumed("run", here))


def signals_at_random(folder: Path, times: int = 12) -> Iterator[str]:
    """Ctrl-C at any moment, imports and reports included: no traceback, a code that says so."""
    rng, path = random.Random(11), scenario(folder)
    for number in range(times):
        process = start(
            "run", str(path), "--out", f"run{number}", "--no-history", cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(0.3 + rng.uniform(0.0, 4.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        yield from wrong(number, ended(process), 0, ExitCode.INTERRUPTED, -signal.SIGINT)


# --- terminals and streams --------------------------------------------------------------------


def seen(folder: Path, columns: int, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and all that a harness sends to a terminal that is so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = start(
        "run", str(scenario(folder)), "--out", f"run-{columns}-{'-'.join(env) or 'plain'}",
        "--no-history", cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs,
        env={"COLUMNS": "", "LINES": "", "TERM": "xterm-256color"} | env,
    )  # fmt: skip
    os.close(theirs)
    data = b""
    with suppress(OSError):  # Linux's end of file
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.1)[0]:
                data += os.read(ours, 1 << 16)
    os.close(ours)
    return process.wait(), data.decode(errors="replace")


def terminals(folder: Path) -> Iterator[str]:
    """No line is wider than the terminal, but a path, which must stay one piece to be copied."""
    envs: tuple[dict[str, str], ...] = ({}, {"NO_COLOR": "1"}, {"TERM": "dumb"})
    for columns, env in ((columns, env) for columns in (80, 120) for env in envs):
        code, text = seen(folder, columns, env)
        if code:
            yield f"{columns} {env}: exit code {code}: {text[-300:]}"
        for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)):
            if cell_len(line.rstrip()) > columns and "run-" not in line:
                yield f"{columns} {env}: {cell_len(line)} columns: {line!r}"
        if "NO_COLOR" in env and re.search(r"\x1b\[(?:[\d;]*;)?(?:3\d|9\d)[\d;]*m", text):
            yield f"{columns} {env}: coloured"
        if "TERM" in env and "\x1b" in text:
            yield f"{columns} {env}: escapes on a dumb terminal"
    found = new_run(scenario(folder), "piped", cwd=folder)
    yield from wrong("pipe", found)
    if "\x1b" in found[1] + found[2]:
        yield "pipe: escapes"


def streams(folder: Path) -> Iterator[str]:
    """A reader that leaves, closed streams, a full device: the exit code is that of the run."""
    scenario(folder)
    for number, (shell, expected) in enumerate((
        ("| head -1", 0), ("2>&1 | head -1", 0), ("--json | head -c 10", 0), ("| true", 0),
        (">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), ("> /dev/full", 6),
    )):  # fmt: skip
        out = f"stream{number}"
        command = f"$HARNESS run chaos.yaml --no-history --out {out} {shell}"
        yield from wrong(shell, shell_run(f"exec 5<&0; {command}", folder), expected)
        again = shell_run(f"$HARNESS run --resume {out} --no-history", folder)
        yield from wrong(f"{shell}, resumed", again)
        yield from wrong(shell, shell_run(f"$HARNESS check {out} {shell}", folder), expected)
    for path in folder.glob("stream*/runs/*/*.json*"):
        # What a closed stream would have been may not be a file of ours.
        if b"dp2-seed" in path.read_bytes().split(b"{")[0]:
            yield f"{path}: has output in it"


def shell_run(command: str, folder: Path) -> Outcome:
    """A shell's command, in which $HARNESS is one over stub ranks."""
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=folder, capture_output=True, timeout=240,
        text=True, errors="replace", env=os.environ
        | {"PYTHONPATH": str(ROOT), "HARNESS": f"{sys.executable} -m tests.chaos.harness"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


# --- variables, users, paths ------------------------------------------------------------------


def variables(folder: Path) -> Iterator[str]:
    """No HOME, no TMPDIR, none of the usual ones: a run is made all the same."""
    path = scenario(folder)
    for number, changes in enumerate((
        {"HOME": "/nowhere", "TMPDIR": "/nowhere"}, {"HOME": "", "TMPDIR": "", "PATH": ""},
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        {"XDG_CACHE_HOME": "/proc/nowhere", "MPLCONFIGDIR": "/proc/nowhere"},
    )):  # fmt: skip
        yield from wrong(changes, new_run(path, f"run{number}", cwd=folder, env=changes))
    args = ("run", str(path), "--out", "bare", "--no-history")
    yield from wrong("bare", ended(start(*args, cwd=folder, bare=("HOME", "TMPDIR"))))


def masks(folder: Path) -> Iterator[str]:
    """Whatever umask: a run, or one line."""
    for mask, code in ((0o077, 0), (0o022, 0), (0o777, 6), (0o400, 6)):
        here, about = folder / f"{mask:03o}", f"umask {mask:03o}"
        here.mkdir()
        args = ("run", str(scenario(here)), "--out", "run", "--no-history")
        found = ended(start(*args, cwd=here, umask=mask, through=BOUND))
        yield from wrong(about, found, code, says="ermission denied")
        open_to_all = [p.name for p in here.glob("run/*") if p.stat().st_mode & 63]
        if mask == 0o077 and open_to_all:
            yield f"{about}: others may read {open_to_all}"


def paths(folder: Path) -> Iterator[str]:
    """Names with spaces, line breaks and other scripts; too long ones; another file system."""
    path = scenario(folder)
    for name in ("a b", "new\nline", "ünï-日本-🜁", "-dash", "'quote\"s'", "%d %s {x} [red]",
                 "x" * 200):  # fmt: skip
        out = str(folder / name / "run")
        yield from wrong(name, new_run(path, out, cwd=folder))
        for command in (("check", out), ("report", out), ("show", SHOWN, out)):
            yield from wrong(f"{name} {command[0]}", run(*command, cwd=folder))
    for name in ("x" * 300, "/".join(["y" * 100] * 45), "nul/../" * 800 + "z"):
        yield from wrong(f"{name[:20]}...", new_run(path, name, cwd=folder), 4, 6, says=" ")
    with suppress(PermissionError), small_disk(folder, "64m") as disk:
        out = str(disk / "run")
        yield from wrong("another disk", run("run", str(path), "--out", out, cwd=folder))
        merged = run("merge", out, "--out", str(folder / "merged"), cwd=folder)
        yield from wrong("merged from another disk", merged)


FAULTS: tuple[Callable[[Path], Iterator[str]], ...] = (
    full_disk, read_only, two_harnesses, each_write, flood, secrets, clocks, signals,
    signals_at_random, terminals, streams, variables, masks, paths,
)  # fmt: skip
