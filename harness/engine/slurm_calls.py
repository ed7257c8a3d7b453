"""Slurm's commands: submit, look, cancel, ask why. Every call has a time limit of its own.

    sbatch --parsable    the job's id; refused for good (`UsageError`) or for now (tried again)
    squeue -t all        state of every job of this user, by job name
    scancel              by id, or by name where the id is not known
    sacct, scontrol      what became of a job that ended; sacct needs accounting, which may be off

A job is known by its name, which nobody else uses, never by its id alone: a controller that was
killed right after a submission gives the same id to the next job. A command that fails says nothing
about a job: `NoAnswer` is not "gone".
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from harness.engine.process import server_environment
from harness.errors import Infrastructure, UsageError, one_line

ENDED = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "BOOT_FAIL", "DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
    }
)  # fmt: skip
"""States that a job does not leave again, but by being started anew."""
STUCK = (
    "launch failed requeued held", "badconstraints", "invalidaccount", "invalidqos",
    "dependencyneversatisfied", "partitiontimelimit", "partitionnodelimit",
)  # fmt: skip
"""Reasons, in lower case, for which a pending job would wait for ever. Nodes that are down, limits
of an account and jobs held by hand are none: these pass."""
PASSING = (
    "unable to contact slurm controller", "socket timed out", "timed out", "connection refused",
    "connection reset", "connection timed out", "temporarily unable", "resource temporarily",
    "slurm backup controller in standby", "zero bytes were transmitted", "communication",
    "transport endpoint", "job submission not available", "try again", "munge", "plugin_init",
    "insane message", "slurm_load", "unable to establish",
)  # fmt: skip
"""What the commands say, in lower case, of trouble that has nothing to do with the request."""
FULL = (
    "maxsubmit", "job submit limit", "maxjobcount", "maximum job count", "unable to accept job",
)  # fmt: skip
"""What sbatch says, in lower case, of a limit on jobs in the queue. At the controller's own limit
it says the last of these and tries again by itself, for minutes, while nobody looks at the jobs."""
SETTINGS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
"""Variables that say which Slurm; all others of that name are of a job that we may be in."""
_OF_OTHERS = ("SLURM_", "SQUEUE_", "SCANCEL_", "SACCT_")
_OF_SBATCH = frozenset(
    {"SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_INPUT", "SBATCH_OUTPUT", "SBATCH_ERROR"}
)
RETRY_S = 0.5
LONGEST_RETRY_S = 15.0


Answer = TypeVar("Answer")
pause = time.sleep
"""Between two attempts."""


class Account(NamedTuple):
    """How a job ended: its state, '' if nobody knows, in words, and its script's exit code."""

    state: str = ""
    text: str = ""
    exit_code: int | None = None


class QueueFull(UsageError):
    """Slurm takes no more jobs of this user until some have ended."""


class NoAnswer(Exception):
    """The controller did not answer; the text says how."""


@dataclass(frozen=True)
class JobState:
    """A line of squeue."""

    job_id: int
    state: str
    reason: str

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
        return self.state in ENDED

    @property
    def leaving(self) -> bool:
        """Whether the job is over, or its nodes are about to be free."""
        return self.ended or self.state == "COMPLETING"

    @property
    def stuck(self) -> bool:
        """Whether it waits for what will not come by itself."""
        told = self.reason.lower()
        return self.state == "PENDING" and any(told.startswith(reason) for reason in STUCK)


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what would change a command or, handed on, a job.

    A harness in a job of its own has that job's variables: how often it was restarted, its memory
    and tasks, and the step in it. A filter for squeue would make jobs vanish. What sbatch asks for
    by default (`SBATCH_ACCOUNT`) is the user's to say.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in SETTINGS or not (name.startswith(_OF_OTHERS) or name in _OF_SBATCH)
    }


class SlurmCalls:
    """The commands, for this user. Each raises `NoAnswer`, or `Infrastructure` without a Slurm."""

    def __init__(self, *, answer_s: float, away_s: float) -> None:
        """Prepare.

        Args:
            answer_s: how long one command may take.
            away_s: how long a submission is tried again while the controller does not answer.
        """
        self._answer_s, self._away_s = answer_s, away_s

    def submit(
        self,
        options: Sequence[str],
        script: str,
        name: str,
        tried: bool = False,  # noqa: FBT001, FBT002
    ) -> int:
        """Submit a job; its id. `tried`: an earlier call may have been heard.

        Raises:
            UsageError: Slurm refused it, and says why.
            Infrastructure: no Slurm here, or no answer for `away_s`.
        """

        def attempt() -> int:
            nonlocal tried
            # An attempt that got no answer may have been heard all the same.
            found = self.states().get(name) if tried else None
            if found is not None:
                return found.job_id
            tried = True
            text = self._call("sbatch", "--parsable", *options, script=script).strip()
            match = re.match(r"\d+", text.rpartition("\n")[2])
            if match is None:
                raise UsageError(f"sbatch: expected the id of a job, got {text[:200]!r}")
            return int(match.group())

        return self.patiently(attempt)

    def would_take(self, options: Sequence[str], script: str) -> None:
        """Ask whether Slurm would ever run such a job; raises as `submit`."""
        self.patiently(lambda: self._call("sbatch", "--test-only", *options, script=script))

    def patiently(self, ask: Callable[[], Answer]) -> Answer:
        """What `ask` gives, asked again and again for `away_s` while nobody answers.

        Raises:
            Infrastructure: nobody did.
        """
        delay_s, until_s = RETRY_S, time.monotonic() + self._away_s
        while True:
            try:
                return ask()
            except NoAnswer as error:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise Infrastructure(
                        f"Slurm gave no answer for {self._away_s:g} s: {error}"
                    ) from None
            pause(min(delay_s, left_s))
            delay_s = min(2 * delay_s, LONGEST_RETRY_S)

    def states(self) -> dict[str, JobState]:
        """This user's jobs by name, those that ended lately included."""
        text = self._call(
            "squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%A|%T|%r|%j"
        )
        found: dict[str, JobState] = {}
        for line in text.splitlines():
            job_id, _, rest = line.partition("|")
            state, _, rest = rest.partition("|")
            reason, _, name = rest.rpartition("|")
            if job_id.isdigit():
                found[name] = JobState(int(job_id), state, reason)
        return found

    def cancel(self, *, job_ids: Sequence[int] = (), names: Sequence[str] = ()) -> None:
        """Cancel jobs, by id or by name; those that are gone already are no error."""
        if job_ids:
            self._call("scancel", "--quiet", *map(str, job_ids))
        for name in names:
            self._call("scancel", "--quiet", f"--user={os.getuid()}", f"--name={name}")

    def account(self, job_id: int, name: str) -> Account:
        """How a job ended, as sacct or scontrol say it."""
        for ask in (self._from_sacct, self._from_scontrol):
            with suppress(NoAnswer, UsageError, Infrastructure):
                if (found := ask(job_id, name)) is not None:
                    return found
        return Account()

    def _from_sacct(self, job_id: int, name: str) -> Account | None:
        fields = "--format=State,ExitCode,NodeList,JobName"
        text = self._call("sacct", "-n", "-P", "-X", "-D", f"--jobs={job_id}", fields)
        rows = [line.split("|", 3) for line in text.splitlines()]
        ours = [row for row in rows if len(row) == 4 and row[3] == name]
        if not ours:
            return None
        told, code, nodes, _ = ours[-1]  # of a job that was started again, the last start
        words = f"sacct: {told}, exit code {code}, nodes {nodes}"
        return Account(told.partition(" ")[0], words, _exit_code(code))

    def _from_scontrol(self, job_id: int, name: str) -> Account | None:
        for line in self._call("scontrol", "-o", "show", "job", str(job_id)).splitlines():
            found = dict(re.findall(r"(\w+)=(\S+)", line))
            if found.get("JobName") == name:
                state, code = found.get("JobState", ""), found.get("ExitCode", "?")
                words = (
                    f"scontrol: {state}, reason {found.get('Reason', 'None')}, exit code {code}, "
                    f"nodes {found.get('NodeList', '?')}"
                )
                return Account(state, words, _exit_code(code))
        return None

    def _call(self, program: str, *arguments: str, script: str | None = None) -> str:
        """Standard output of a command.

        Raises:
            NoAnswer: it took too long, or says that the controller is away.
            UsageError: it refused; its own words.
            Infrastructure: there is no such program.
        """
        try:
            done = subprocess.run(
                [program, *arguments],
                input=script,
                stdin=subprocess.DEVNULL if script is None else None,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._answer_s,
                check=False,
                env=server_environment(own_environment(os.environ)),
                # Ctrl-C at the terminal is for the harness to act on, not for half a submission.
                start_new_session=True,
            )
        except FileNotFoundError:
            raise Infrastructure(
                f"engine slurm: {program} was not found on PATH; legal values of --engine here: "
                "local"
            ) from None
        except subprocess.TimeoutExpired as late:
            said = one_line((late.stderr or b"").decode(errors="replace").strip())[-500:]
            _refuse_if_full(program, said)
            raise NoAnswer(f"{program} took more than {self._answer_s:g} s") from None
        if done.returncode == 0:
            return done.stdout
        said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        said = one_line(said or done.stdout.strip() or f"exit code {done.returncode}")[:500]
        _refuse_if_full(program, said)
        if any(phrase in said.lower() for phrase in PASSING):
            raise NoAnswer(f"{program}: {said}")
        raise UsageError(f"{program} refused: {said}")


def _refuse_if_full(program: str, said: str) -> None:
    if any(phrase in said.lower() for phrase in FULL):
        raise QueueFull(f"{program} refused: {said}")


def _exit_code(told: str) -> int | None:
    """The first number of Slurm's `137:0`."""
    code = told.partition(":")[0]
    return int(code) if code.isdecimal() else None
