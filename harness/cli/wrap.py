"""`harness wrap -- COMMAND`: start a training job as ever, and have its ranks record themselves.

The command keeps this terminal and gets every signal that this process gets. Its ranks learn from
the environment where to record (`harness.recorder`); here they are only watched for how they end.
"""

import os
import selectors
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from types import FrameType

import click

from fsdp_core.config import ConfigError, tap_pattern
from harness.checks.complete import find_flaw
from harness.checks.evidence import count
from harness.cli import options
from harness.engine.process import code_of_zombie, has_mark, signal_quietly
from harness.errors import UsageError, shown
from harness.masking import Masker
from harness.program.launch import recording
from harness.program.spec import POSITIONAL, ProgramSpec
from harness.recorder import FOLDER_VARIABLE, RUN_VARIABLE
from harness.records import ExitCode, RunResult, RunSpec
from harness.runner import recorded
from harness.runner.recorded import Part
from harness.scenario.settings import DETERMINISM
from harness.store.streams import read_start
from harness.store.verify import DEFAULT_OUT, unused

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
             signal.SIGUSR2, signal.SIGCONT)  # fmt: skip
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOOK_SHARE, FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.05, 5.0
"""How soon new ranks are looked for again: after this share of the time so far, within bounds."""
SIGNAL_CODE = 128
"""Shells add it to the number of the signal that ended a command."""


@click.command("wrap", context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option(
    "--out", type=options.PATH, metavar="RUN",
    help="Folder to record in; by default a new one under out/.",
)  # fmt: skip
@click.option("--name", default="", metavar="NAME", help="Name of the new folder under out/.")
@click.option(
    "--steps", type=click.IntRange(1), metavar="N",
    help="Steps that each rank must take; fewer are an error.",
)  # fmt: skip
@click.option(
    "--taps", multiple=True, metavar="PATTERN",
    help="Modules whose outputs and gradients are digested, as taps of a scenario.",
)  # fmt: skip
@click.option(
    "--every", type=click.IntRange(1), default=1, metavar="N", help="Digest every Nth step only."
)
@click.option(
    "--determinism", type=click.Choice(DETERMINISM), default="off", show_default=True,
    help="enforce: seed every generator and ask torch for deterministic kernels.",
)  # fmt: skip
@click.option(
    "--part", metavar="I/N", default="",
    help="This is part I of N processes that record into the same --out; not needed under srun.",
)  # fmt: skip
def wrap_command(
    *, command: tuple[str, ...], out: Path | None, name: str, steps: int | None,
    taps: tuple[str, ...], every: int, determinism: str, part: str,
) -> int:  # fmt: skip
    """Record a job that COMMAND starts, for harness compare-runs.

    Output, signals and exit code are those of COMMAND. If it exits with 0: 5 if nothing was
    recorded, 6 if the records are not whole.
    """
    if FOLDER_VARIABLE in os.environ:
        raise UsageError("wrap: expected a job that nobody records yet, this one is recorded")
    for pattern in taps:
        try:
            tap_pattern(pattern)
        except ConfigError as error:
            raise UsageError(f"--taps: expected {error.expected}, got {shown(error.got)}") from None
    name = name or _name(command)
    if shutil.which(command[0]) is None:
        raise UsageError(f"wrap: expected a command, {shown(command[0])} is none")
    index, parts, job = _place(part, out)
    folder = (out or _folder_of(name, job)).absolute()
    program = ProgramSpec(
        kind="command", target=command[0], folder=str(Path.cwd()), every=every,
        args={POSITIONAL: Masker(os.environ).words(list(command[1:]))},
        determinism="enforce" if determinism == "enforce" else "",
    )  # fmt: skip
    config = {"program": program.to_json(), "taps": list(taps)}
    spec = RunSpec(
        config=config if steps is None else config | {"steps": steps},
        device="cpu", world_size=recorded.UNKNOWN_SIZE, timeout_s=0.0, recorded=job,
    )  # fmt: skip
    recorded.begin(folder, spec, is_joint=parts > 1)
    variables = recording(program, folder, os.environ) | {RUN_VARIABLE: job}
    seen = _run(command, os.environ | variables, folder, f"{RUN_VARIABLE}={job}")
    run = recorded.finish(folder, spec, seen, index=index, parts=parts)
    return _show(folder, run, seen, alone=parts == 1)


def _name(command: tuple[str, ...]) -> str:
    """The script's name among a command's words, else its first word's."""
    scripts = [word for word in command if word.endswith(".py") and not word.startswith("-")]
    stem = PurePath(scripts[0] if scripts else command[0]).stem
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in stem).lstrip(".") or "run"


def _place(part: str, out: Path | None) -> tuple[int, int, str]:
    """This process's number among those that record the run, how many these are, the run's name."""
    if part:
        first, _, last = part.partition("/")
        if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise UsageError(f"--part: expected I/N with 1 <= I <= N, got {shown(part)}")
        if out is None:
            raise UsageError("--part: expected --out RUN with it, a folder that all parts see")
        return int(first) - 1, int(last), f"parts-{out.absolute().name}"
    size, step = (os.environ.get(f"SLURM_STEP_{name}", "") for name in ("NUM_TASKS", "ID"))
    if step and size.isdecimal() and int(size) > 1:
        job = f"slurm-{os.environ.get('SLURM_JOB_ID', '')}.{step}"
        return int(os.environ["SLURM_PROCID"]), int(size), job
    return 0, 1, uuid.uuid4().hex


def _folder_of(name: str, job: str) -> Path:
    if job.startswith("slurm-"):
        return DEFAULT_OUT / f"{name}-{job}"  # the same for all tasks
    return unused(DEFAULT_OUT / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")


def _run(command: Sequence[str], environ: Mapping[str, str], folder: Path, mark: str) -> Part:
    """Run the command to its end, and say how it and the ranks on this machine ended."""
    started_unix_s, started_s = time.time(), time.monotonic()
    watch = _Watch(folder, mark)
    with _signals_passed_on() as passing:
        try:
            process = subprocess.Popen(command, env=environ)
        except OSError as error:
            raise UsageError(f"wrap: {shown(command[0])}: {error.strerror}") from error
        passing.pid = process.pid
        watch.until_end(process.pid)
        code = process.wait()
        watch.last_look(process.pid, code)
    return Part(
        code=code,
        exits={str(rank): exit for rank, exit in sorted(watch.exits.items())},
        order=tuple(watch.order),
        stopped_by=next((number for number in passing.sent if number in STOPS), 0),
        started_unix_s=started_unix_s,
        wall_s=time.monotonic() - started_s,
    )


@dataclass
class _Passing:
    """The command that gets this process's signals, and those that it got."""

    pid: int = 0
    sent: list[int] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.sent.append(number)
        # Of a key that is pressed, the whole group in the foreground hears by itself.
        if self.pid and not (number in (signal.SIGINT, signal.SIGQUIT) and _in_foreground()):
            signal_quietly(self.pid, number)


def _in_foreground() -> bool:
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def _signals_passed_on() -> Iterator[_Passing]:
    passing = _Passing()
    before = {number: signal.signal(number, passing) for number in PASSED_ON}
    try:
        yield passing
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watch:
    """Watches ranks on this machine end, which are children of others.

    A rank is known by its start record and by the mark in its environment: another machine's may
    have the same process id. Its exit code can be read until its parent has waited for it.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.exits: dict[int, int] = {}
        self.order: list[int] = []
        self._folder, self._mark = folder, mark
        self._pids: dict[int, int] = {}
        self._known: set[str] = set()
        self._world_size = 0

    def until_end(self, pid: int) -> None:
        """Watch until the process `pid`, a child, has ended."""
        began_s = time.monotonic()
        with selectors.DefaultSelector() as selector, ExitStack() as files:
            while True:
                for rank, file in self._look(pid):
                    files.callback(os.close, file)
                    selector.register(file, selectors.EVENT_READ, rank)
                complete = 0 < self._world_size < len(self._known)
                share_s = LOOK_SHARE * (time.monotonic() - began_s)
                patience_s = min(max(share_s, FIRST_LOOK_S), LONGEST_LOOK_S)
                for key, _ in selector.select(None if complete else patience_s):
                    if key.data is None:
                        return
                    self._note(key.data, code_of_zombie(self._pids[key.data]))
                    selector.unregister(key.fileobj)

    def last_look(self, pid: int, code: int) -> None:
        """The command, which has ended with `code`, may have been a rank itself."""
        for _, file in self._look(pid):
            os.close(file)
        for rank in [rank for rank, its in self._pids.items() if its == pid]:
            self._note(rank, code)

    def _look(self, pid: int) -> Iterator[tuple[int | None, int]]:
        """Ranks that have begun to record, and the command, with a file that says when they end."""
        if "" not in self._known:
            self._known.add("")
            yield None, os.pidfd_open(pid)
        for path in self._folder.glob("rank*.jsonl"):
            if path.name in self._known or (start := read_start(path)) is None:
                continue
            self._known.add(path.name)
            self._world_size = start.world_size
            if has_mark(start.pid, self._mark):
                self._pids[start.rank] = start.pid
                with suppress(OSError):  # it has ended meanwhile
                    yield start.rank, os.pidfd_open(start.pid)

    def _note(self, rank: int, code: int | None) -> None:
        if code is not None:
            self.exits[rank] = code
        if code != 0 and rank not in self.order:
            self.order.append(rank)


def _show(folder: Path, run: RunResult | None, part: Part, *, alone: bool) -> int:
    """A line on stderr of what there is now, and the exit code."""
    code = part.code if part.code >= 0 else SIGNAL_CODE - part.code
    if run is None:
        if not alone:
            return code  # the one that ends last says what there is
        click.echo(
            f"harness: recorded nothing in {folder}: no process of the command trained with torch "
            "and this environment",
            err=True,
        )
        return code or ExitCode.NOTHING_RAN
    flaw = find_flaw(recorded.with_steps(run, recorded.steps_on_rank_0(run)))
    if flaw is not None:
        click.echo(f"harness: recorded in {folder}, not whole: {flaw.message}", err=True)
        return code or ExitCode.NO_VERDICT
    size = f"{count(run.spec.world_size, 'rank')}, {count(recorded.steps_on_rank_0(run), 'step')}"
    click.echo(f"harness: recorded {size}: {folder}", err=True)
    return code
