"""What is run at a commit: a command, as `git bisect run` has it, or one case of the harness.

    exit code of a command   0 passes, 125 no verdict, 1 to 124 fails; 126 and 127, no verdict, as
                             there was no such command; above, or a signal, ends the search
    a build before it        any exit code but 0: no verdict
    a case                   passes, or fails as it did; whatever else it does is no verdict

The interpreter is ours, the packages are the commit's: `PYTHONPATH` begins with the worktree, and
has nothing of the user's own checkout. An editable installation of our packages is shut out
(`SHUT_OUT`): it would lend a commit the modules that it lacks.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness.bisector.case_at_commit import ORDER_WORK, PROBE, Known, read_probe, translated
from harness.bisector.commit_range import HASH_CHARS, Checkout, Run
from harness.bisector.questions import FAILS, PASSES, UNRESOLVED, Answer, Reply
from harness.bisector.worktree import OF_HOOKS
from harness.codec import dumps
from harness.engine.process import die_with_parent
from harness.errors import Infrastructure, Interrupted, UsageError, one_line
from harness.records import CaseSpec, Ending, ExitCode, Verdict
from harness.store import CASE_FILE
from harness.store.files import make_folder, read_object, read_tail, with_checksum, write_atomic
from harness.store.find import unused

NO_VERDICT = 125
MAX_CODE = 127
GRACE_S = 10.0
TAIL_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 24
_CODES = {"failed": ExitCode.FAILED, "incomparable": ExitCode.NO_VERDICT}
"""Exit codes of outcomes that can be searched for."""

SHUT_OUT = """\
import importlib.machinery, importlib.util, os, sys
for finder in sys.meta_path:
    module = sys.modules.get(getattr(finder, "__module__", ""))
    mapping = getattr(module, "MAPPING", None)
    if isinstance(mapping, dict):
        for name in ("fsdp_core", "harness", "reports"):
            mapping.pop(name, None)
here = os.path.dirname(os.path.abspath(__file__))
others = [path for path in sys.path if os.path.abspath(path) != here]
spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
"""A `sitecustomize` of runs at commits; that of the user comes after it."""


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
        room: further options of `harness rerun`, each with its value.
    """

    def run(checkout: Checkout) -> Reply:
        make_folder(folder)
        log = folder / f"{_name(checkout)}.log"
        # Where we are, for paths of the case; the interpreter does not look there for modules.
        env = python_environment(checkout) | {"PYTHONSAFEPATH": "1"}
        known = _probe(checkout, log, env)
        if isinstance(known, Reply):
            return known
        case = translated(read_object(place / CASE_FILE), known)
        if case.why_not:
            return Reply(answer=UNRESOLVED, words=f"no verdict: it does not know {case.why_not}")
        out = unused(folder / _name(checkout))
        asked = out.with_name(f"{out.name}.case")
        make_folder(asked)
        plain = with_checksum(case.plain) if known.checksums else case.plain
        write_atomic(asked / CASE_FILE, dumps(plain) + "\n")
        options = _known_options(("--no-history", *room), known)
        command = (
            *(sys.executable, "-m", "harness", "rerun", str(asked.absolute())),
            *("--out", str(out.absolute()), "--json", *options),
        )
        answers = log.with_suffix(".json")
        try:
            code = _run(command, log, cwd=Path.cwd(), env=env, stdout=answers)
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        if code in (ExitCode.INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            raise Interrupted(f"interrupted at {checkout.commit[:HASH_CHARS]}")
        reply = _judged(code, answers, log, verdict)
        return replace(reply, detail=case.detail)

    return run


def _known_options(options: Sequence[str], known: Known) -> list[str]:
    """Without those that decide no bits, where the commit has no such option."""
    kept, takes = list[str](), True
    for word in options:
        if word.startswith("--"):
            takes = known.options is None or word in known.options or word not in ORDER_WORK
        if takes:
            kept.append(word)
    return kept


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
    site = checkout.folder.with_name("site")
    make_folder(site)
    write_atomic(site / "sitecustomize.py", SHUT_OUT)
    path = os.pathsep.join([str(site), str(checkout.folder), *others])
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


def _probe(checkout: Checkout, log: Path, env: Mapping[str, str]) -> Known | Reply:
    """What the commit's harness knows; no verdict for a commit that does not import."""
    probed = log.with_suffix(".probe")
    code = _run((sys.executable, "-c", PROBE), log, cwd=Path.cwd(), env=env, stdout=probed)
    if code != 0:
        return Reply(answer=UNRESOLVED, words=f"does not build: {_last_line(log)}")
    try:
        known = read_probe(read_tail(probed, MAX_ANSWER_BYTES).decode(errors="replace"))
    except ValueError as error:
        return Reply(answer=UNRESOLVED, words=one_line(f"no verdict: it cannot be asked: {error}"))
    inside = [Path(f).resolve().is_relative_to(checkout.folder.resolve()) for f in known.files]
    if not inside[0]:
        raise Infrastructure(f"expected harness of {checkout.folder}, got {known.files[0]}")
    if not all(inside):
        elsewhere = known.files[inside.index(False)]
        return Reply(answer=UNRESOLVED, words=f"no verdict: it would run {elsewhere}")
    return known


def _judged(code: int | None, answers: Path, log: Path, wanted: Verdict) -> Reply:
    try:
        plain = json.loads(read_tail(answers, MAX_ANSWER_BYTES))
        (verdict,) = plain["verdicts"]
        # Other commits have other fields; these three are as old as verdicts.
        outcome, what, message = (str(verdict[name]) for name in ("outcome", "what", "message"))
        ending = _ending(verdict.get("ending"))
    except (ValueError, KeyError, TypeError):
        return Reply(
            answer=UNRESOLVED, words=f"no verdict: exit code {code} {_last_line(log)}".strip()
        )
    if outcome == "passed" and code == ExitCode.PASSED:
        return Reply(answer=PASSES, words=outcome)
    is_same = (outcome, what) == (wanted.outcome, wanted.what) and same_end(wanted, ending)
    if is_same and code == _CODES.get(outcome):
        return Reply(answer=FAILS, words=one_line(f"{outcome} {what}".strip()))
    words = f"no verdict: {outcome} {what} {message}"
    return Reply(answer=UNRESOLVED, words=one_line(words.strip()))


def _ending(plain: object) -> Ending | None:
    """The two fields that are compared, of a harness that may have others; None of an older one."""
    if not isinstance(plain, dict):
        return None
    return Ending(exception=str(plain.get("exception", "")), signal=str(plain.get("signal", "")))


def same_end(wanted: Verdict, ending: Ending | None) -> bool:
    """Whether a run was ended by the same exception or signal; not if only one is known."""
    if wanted.what != "crashed" or wanted.ending is None:
        return True
    ours = wanted.ending
    return ending is not None and (ours.exception, ours.signal) == (
        ending.exception, ending.signal
    )  # fmt: skip


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
                # Killed without a word, we leave nobody at work in a worktree that goes away.
                preexec_fn=partial(die_with_parent, os.getpid()),
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
