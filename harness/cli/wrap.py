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
from datetime import UTC, datetime
from pathlib import Path, PurePath
from types import FrameType

import click

from fsdp_core.config import ConfigError, tap_pattern
from harness import cli
from harness.checks.complete import find_flaw
from harness.checks.evidence import count
from harness.engine.machine import code_of_zombie, has_mark, signal_quietly
from harness.errors import UsageError, shown
from harness.masking import Masker
from harness.program.spec import POSITIONAL, ProgramSpec, recording
from harness.recorder import FOLDER_VARIABLE, RUN_VARIABLE
from harness.records import ExitCode, RunResult, RunSpec
from harness.runner import recorded
from harness.runner.recorded import Wrapped
from harness.scenario.settings import DETERMINISM
from harness.store.folder import DEFAULT_OUT, unused
from harness.store.streams import read_start

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
             signal.SIGUSR2, signal.SIGCONT)  # fmt: skip
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOOK_SHARE, FIRST_LOOK_S, LONGEST_LOOK_S = 0.05, 0.05, 5.0
"""How soon new ranks are looked for again: after this share of the time so far, within bounds."""


@click.command("wrap", context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--out", type=cli.PATH, metavar="RUN",
              help="Folder to record in; by default a new one under out/.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), metavar="N",
              help="Steps that each rank must take; fewer are an error.")  # fmt: skip
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
    *, command: tuple[str, ...], out: Path | None, steps: int | None, taps: tuple[str, ...],
    every: int, determinism: str, part: str,
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
    if shutil.which(command[0]) is None:
        raise UsageError(f"wrap: expected a command, {shown(command[0])} is none")
    index, parts, job = _place(part, out)
    fresh = unused(DEFAULT_OUT / f"{_name(command)}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    of_slurm = DEFAULT_OUT / f"{_name(command)}-{job}"  # the same for all tasks
    folder = (out or (of_slurm if job.startswith("slurm-") else fresh)).absolute()
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
    code = seen.code if seen.code >= 0 else 128 - seen.code  # as shells tell a signal
    if run is None and parts > 1:
        return code  # the one that ends last says what there is
    words, missing = _words(run, folder)
    click.echo(f"harness: {words}", err=True)
    return code or missing


def _name(command: tuple[str, ...]) -> str:
    scripts = [word for word in command if word.endswith(".py") and not word.startswith("-")]
    stem = PurePath(scripts[0] if scripts else command[0]).stem
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in stem).lstrip(".") or "run"


def _place(part: str, out: Path | None) -> tuple[int, int, str]:
    """The number of this recording process, how many there are, and the name of the run."""
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


def _words(run: RunResult | None, folder: Path) -> tuple[str, ExitCode]:
    """What there is now, and the exit code of a command that ended well."""
    if run is None:
        why = "no process of the command trained with torch and this environment"
        return f"recorded nothing in {folder}: {why}", ExitCode.NOTHING_RAN
    steps = recorded.steps_on_rank_0(run)
    if flaw := find_flaw(recorded.with_steps(run, steps)):
        return f"recorded in {folder}, not whole: {flaw.message}", ExitCode.NO_VERDICT
    size = f"{count(run.spec.world_size, 'rank')}, {count(steps, 'step')}"
    return f"recorded {size}: {folder}", ExitCode.PASSED


# ---- the command and its ranks


def _run(command: Sequence[str], environ: Mapping[str, str], folder: Path, mark: str) -> Wrapped:
    started_unix_s, started_s, sent = time.time(), time.monotonic(), list[int]()
    with _signals_passed_on(sent) as to:
        try:
            process = subprocess.Popen(command, env=environ)
        except OSError as error:
            raise UsageError(f"wrap: {shown(command[0])}: {error.strerror}") from error
        to.append(process.pid)
        exits = _watch(process, folder, mark)
    return Wrapped(
        code=process.returncode,
        exits={str(rank): code for rank, code in sorted(exits.items()) if code is not None},
        order=tuple(rank for rank, code in exits.items() if code != 0),
        stopped_by=next((n for n in sent if n in STOPS), 0), started_unix_s=started_unix_s,
        wall_s=time.monotonic() - started_s,
    )  # fmt: skip


def _watch(process: subprocess.Popen[bytes], folder: Path, mark: str) -> dict[int, int | None]:
    """Wait for the command; exit codes of ranks on this machine, in the order in which they ended.

    A rank is known by its start record and by the mark in its environment: another machine's may
    have the same process id. It is a child of others: its exit code can be read until its parent
    has waited for it; None if that was sooner.
    """
    exits, pids, known, world_size = dict[int, int | None](), dict[int, int](), set[str](), 0
    began_s, is_over = time.monotonic(), False
    with selectors.DefaultSelector() as selector, ExitStack() as files:

        def watch(pid: int, rank: int | None) -> None:
            with suppress(OSError):  # it has ended meanwhile
                files.callback(os.close, file := os.pidfd_open(pid))
                selector.register(file, selectors.EVENT_READ, rank)

        watch(process.pid, None)
        while True:
            for path in folder.glob("rank*.jsonl"):
                if path.name not in known and (start := read_start(path)) is not None:
                    known.add(path.name)
                    world_size = start.world_size
                    if has_mark(start.pid, mark):
                        pids[start.rank] = start.pid
                        watch(start.pid, start.rank)
            if is_over:
                break
            patience_s = LOOK_SHARE * (time.monotonic() - began_s)
            patience_s = min(max(patience_s, FIRST_LOOK_S), LONGEST_LOOK_S)
            is_complete = 0 < world_size <= len(known)
            for key, _ in selector.select(None if is_complete else patience_s):
                is_over = is_over or key.data is None
                if key.data is not None:
                    exits[key.data] = code_of_zombie(pids[key.data])
                    selector.unregister(key.fileobj)
    code = process.wait()  # of the command, which may have been a rank itself
    return exits | {rank: code for rank, pid in pids.items() if pid == process.pid}


@contextmanager
def _signals_passed_on(sent: list[int]) -> Iterator[list[int]]:
    """Note signals in `sent`, and send each to the processes whose ids are put into the list."""
    to: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        sent.append(number)
        # Of a key that is pressed, the whole group in the foreground hears by itself.
        if not (number in (signal.SIGINT, signal.SIGQUIT) and _in_foreground()):
            for pid in to:
                signal_quietly(pid, number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        yield to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
