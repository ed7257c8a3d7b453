"""What is run at a commit: a command, as `git bisect run` has it, or one case of the harness.

    exit code of a command   0 passes, 125 no verdict, 1 to 124 fails; 126 and 127, no verdict, as
                             there was no such command; above, or a signal, ends the search
    a build before it        any exit code but 0: no verdict
    a case                   passes, or fails as it did; whatever else it does is no verdict

The interpreter is ours, the packages are the commit's: `PYTHONPATH` begins with the worktree, and
has nothing of the user's own checkout.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path

from harness.bisector.commits import HASH_CHARS, Checkout, Run
from harness.bisector.questions import FAILS, PASSES, UNRESOLVED, Answer, Reply
from harness.bisector.worktree import OF_HOOKS
from harness.checksum import with_checksum
from harness.codec import dumps
from harness.disk import make_folder, read_tail, write_atomic
from harness.errors import Infrastructure, Interrupted, UsageError, one_line
from harness.lookup import unused
from harness.object_file import read_object
from harness.records import CaseSpec, ExitCode, RunSpec, Verdict, What
from harness.store import CASE_FILE, LEGS

NO_VERDICT = 125
MAX_CODE = 127
GRACE_S = 10.0
TAIL_BYTES = 4096
_PROBE = "import harness.cli; print(harness.__file__)"


def command_run(
    command: Sequence[str],
    logs: Path,
    *,
    build: Sequence[str] = (),
    timeout_s: float | None = None,
) -> Run:
    """Runs a command in the worktree.

    Args:
        command: words, no shell.
        logs: folder for what it prints, a file a run.
        build: run before it; where it fails there is no verdict.
        timeout_s: of each; what takes longer has no verdict.

    Raises:
        Infrastructure: on a run whose exit code says that the search should end.
    """

    def run(checkout: Checkout) -> Reply:
        log = logs / f"{_name(checkout)}.log"
        env = python_environment(checkout)
        for words in filter(None, (build, command)):
            code = _run(words, log, cwd=checkout.folder, env=env, timeout_s=timeout_s)
            answer = _answer(code, is_build=words is build)
            if answer is None:
                raise Infrastructure(
                    f"{shlex.join(words)} ended with {code} at {checkout.commit[:HASH_CHARS]}, "
                    f"which ends the search: {log}"
                )
            if words is command or answer != PASSES:
                told = "" if answer == PASSES else _last_line(log)
                ended = "did not end" if code is None else f"exit code {code}"
                step = "build: " if words is build else ""
                return Reply(answer=answer, words=f"{step}{ended} {told}".strip())
        raise UsageError("expected a command to run at each commit, got none")

    return run


def case_run(place: Path, verdict: Verdict, folder: Path, room: Sequence[str] = ()) -> Run:
    """Runs a case again, with the harness of the commit.

    Args:
        place: case folder, with `case.json`.
        verdict: of the failure that is searched for.
        folder: gets a run folder a run.
        room: further options of `harness rerun`.
    """
    argv = (sys.executable, "-m", "harness", "rerun", str(_readable(place, folder).absolute()))

    def run(checkout: Checkout) -> Reply:
        make_folder(folder)
        log = folder / f"{_name(checkout)}.log"
        # Where we are, for paths of the case; the interpreter does not look there for modules.
        env = python_environment(checkout) | {"PYTHONSAFEPATH": "1"}
        if (reply := _unusable(checkout, log, env)) is not None:
            return reply
        out = unused(folder / _name(checkout))
        command = (*argv, "--out", str(out.absolute()), "--json", "--no-history", *room)
        answers = log.with_suffix(".json")
        try:
            code = _run(command, log, cwd=Path.cwd(), env=env, stdout=answers)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        if code in (ExitCode.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            raise Interrupted(f"interrupted at {checkout.commit[:HASH_CHARS]}")
        return _judged(code, answers, log, verdict.what)

    return run


def _readable(place: Path, folder: Path) -> Path:
    """A case folder that older commits can read: without the fields that say nothing."""
    if not (place / CASE_FILE).is_file():
        return place
    plain = read_object(place / CASE_FILE)
    silent = {f.name: f.default for f in fields(RunSpec) if f.default is not MISSING}
    for leg in LEGS:
        plain[leg] = {k: v for k, v in plain[leg].items() if k not in silent or v != silent[k]}
    copy = folder / "case"
    make_folder(copy)
    write_atomic(copy / CASE_FILE, dumps(with_checksum(plain)) + "\n")
    return copy


def question_name(case: CaseSpec) -> str:
    """Names what is run, for the keys of questions."""
    return case.candidate.key


def python_environment(checkout: Checkout) -> dict[str, str]:
    """Of a run whose modules are the commit's."""
    others = [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry and not Path(entry).absolute().is_relative_to(checkout.repository)
    ]
    path = os.pathsep.join([str(checkout.folder), *others])
    # What git sets for its hooks would make each git of the run that of the user's checkout.
    kept = {name: value for name, value in os.environ.items() if name not in OF_HOOKS}
    return kept | {"PYTHONPATH": path}


def _name(checkout: Checkout) -> str:
    return f"{checkout.commit[:HASH_CHARS]}-{checkout.attempt}"


def _answer(code: int | None, *, is_build: bool) -> Answer | None:
    """None: the search must end."""
    if code == 0:
        return PASSES
    if code is None or is_build or code in (NO_VERDICT, 126, 127):
        return UNRESOLVED
    return FAILS if 0 < code <= MAX_CODE else None


def _unusable(checkout: Checkout, log: Path, env: Mapping[str, str]) -> Reply | None:
    """No verdict for a commit that does not import."""
    probed = log.with_suffix(".probe")
    code = _run((sys.executable, "-c", _PROBE), log, cwd=Path.cwd(), env=env, stdout=probed)
    if code != 0:
        return Reply(answer=UNRESOLVED, words=f"does not build: {_last_line(log)}")
    place = Path(read_tail(probed, TAIL_BYTES).decode(errors="replace").strip())
    if not place.resolve().is_relative_to(checkout.folder.resolve()):
        raise Infrastructure(f"expected harness of {checkout.folder}, got {place}")
    return None


def _judged(code: int | None, answers: Path, log: Path, wanted: What) -> Reply:
    try:
        plain = json.loads(read_tail(answers, 1 << 24))
        (verdict,) = (Verdict.from_json(entry) for entry in plain["verdicts"])
    except (ValueError, KeyError, TypeError):
        return Reply(
            answer=UNRESOLVED, words=f"no verdict: exit code {code} {_last_line(log)}".strip()
        )
    words = one_line(f"{verdict.outcome} {verdict.what} {verdict.message}".strip())
    if verdict.outcome == "passed" and code == ExitCode.PASSED:
        return Reply(answer=PASSES)
    if verdict.outcome == "failed" and verdict.what == wanted and code == ExitCode.FAILED:
        return Reply(answer=FAILS, words=words)
    return Reply(answer=UNRESOLVED, words=words)


def _last_line(log: Path) -> str:
    lines = read_tail(log, TAIL_BYTES).decode(errors="replace").strip().splitlines()
    return one_line(lines[-1])[:200] if lines else ""


def _run(
    command: Sequence[str],
    log: Path,
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdout: Path | None = None,
    timeout_s: float | None = None,
) -> int | None:
    """Its exit code, None if it took too long; whatever it has started ends with it."""
    make_folder(log.parent)
    with log.open("ab") as said, Path(stdout or os.devnull).open("wb") as answers:
        try:
            process = subprocess.Popen(
                command, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stderr=said,
                stdout=answers if stdout is not None else said, start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            said.write(f"no such command: {command[0]}\n".encode())
            return MAX_CODE
        except OSError as error:
            said.write(f"cannot run {command[0]}: {error.strerror}\n".encode())
            return MAX_CODE - 1
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its children: asked first, so that a harness keeps what it has."""
    if process.poll() is None:
        _signal(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
