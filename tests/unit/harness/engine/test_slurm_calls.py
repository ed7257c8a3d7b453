"""Slurm's commands, played by scripts: what is tried again, what is not, and what is read."""

import os
from pathlib import Path

import pytest

from harness.engine import slurm_calls
from harness.engine.slurm_calls import Account, JobState, NoAnswer, QueueFull, SlurmCalls
from harness.errors import Infrastructure, UsageError

AWAY = "echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller' >&2"


class Commands:
    """A folder of scripts in front of PATH; `calls` has what each was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def play(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.folder}/calls\n{script}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Scripts that stand in for Slurm; time between attempts does not pass."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(slurm_calls, "pause", lambda seconds: None)
    made = Commands(tmp_path)
    for name in ("sbatch", "squeue", "scancel", "sacct", "scontrol"):
        made.play(name, "exit 0")
    return made


@pytest.fixture
def slurm() -> SlurmCalls:
    """Patient for long enough that a test would hang if it had to wait."""
    return SlurmCalls(answer_s=30.0, away_s=600.0)


def test_the_id_is_read_from_parsable_output(commands: Commands, slurm: SlurmCalls) -> None:
    """`ID;CLUSTER`, after whatever a site's plugin prints."""
    commands.play("sbatch", "echo 'Welcome'; echo '1234;big'")
    assert slurm.submit(["--nodes=2"], "#!/bin/sh\n", "mine") == 1234
    assert commands.calls == ["sbatch --parsable --nodes=2"]


def test_a_refusal_is_not_tried_again(commands: Commands, slurm: SlurmCalls) -> None:
    """A partition that is not there is said in Slurm's words, at once and on one line."""
    told = "sbatch: error: invalid partition specified: x\\nsbatch: error: Batch job failed"
    commands.play("sbatch", f"printf '{told}' >&2; exit 1")
    with pytest.raises(UsageError, match=r"refused: .*invalid partition specified: x; sbatch"):
        slurm.submit([], "", "mine")
    assert len(commands.calls) == 1


def test_a_full_queue_is_told_from_a_refusal(commands: Commands, slurm: SlurmCalls) -> None:
    """A limit on jobs in the queue passes by itself, when some have ended."""
    told = "sbatch: error: AssocMaxSubmitJobLimit\\nsbatch: error: Job violates policy"
    commands.play("sbatch", f"printf '{told}' >&2; exit 1")
    with pytest.raises(QueueFull, match="AssocMaxSubmitJobLimit"):
        slurm.submit([], "", "mine")


def test_a_controller_that_takes_no_more_is_not_waited_for(commands: Commands) -> None:
    """sbatch would try again by itself for minutes; what it was heard of is not handed in twice."""
    told = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    commands.play("sbatch", f"echo '{told}' >&2; exec sleep 3600")
    slurm = SlurmCalls(answer_s=0.5, away_s=600.0)
    with pytest.raises(QueueFull, match="unable to accept job"):
        slurm.submit([], "", "mine")
    commands.play("squeue", "echo '7|RUNNING|None|mine'")
    assert slurm.submit([], "", "mine", tried=True) == 7


def test_no_answer_is_tried_again(commands: Commands, slurm: SlurmCalls) -> None:
    """A controller that is away is asked again until it answers."""
    flag = commands.folder / "flag"
    commands.play("sbatch", f"if mkdir {flag} 2>/dev/null; then {AWAY}; exit 1; fi; echo 5")
    assert slurm.submit([], "", "mine") == 5
    assert [call.split()[0] for call in commands.calls] == ["sbatch", "squeue", "sbatch"]


def test_a_submission_that_was_heard_after_all_is_not_made_twice(
    commands: Commands, slurm: SlurmCalls
) -> None:
    """An answer that was lost on its way back must not make a second job."""
    commands.play("sbatch", "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    commands.play("squeue", "echo '8|PENDING|None|other'; echo '9|RUNNING|None|mine'")
    assert slurm.submit([], "", "mine") == 9
    assert [call.split()[0] for call in commands.calls] == ["sbatch", "squeue"]


def test_patience_has_an_end(commands: Commands) -> None:
    """For ever away is the machine's trouble, and says what was heard last."""
    commands.play("sbatch", f"{AWAY}; exit 1")
    commands.play("squeue", f"{AWAY}; exit 1")
    with pytest.raises(Infrastructure, match=r"no answer for 0.2 s: .*Unable to contact"):
        SlurmCalls(answer_s=30.0, away_s=0.2).submit([], "", "mine")


def test_a_command_that_hangs_is_no_answer(commands: Commands) -> None:
    """Each call has its own limit."""
    commands.play("squeue", "exec sleep 60")
    with pytest.raises(NoAnswer, match=r"squeue took more than 0\.2 s"):
        SlurmCalls(answer_s=0.2, away_s=1.0).states()


def test_no_slurm_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sbatch the message says so and what else there is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Infrastructure, match=r"sbatch was not found on PATH; .* local"):
        SlurmCalls(answer_s=1.0, away_s=0.0).submit([], "", "mine")


def test_a_job_that_the_harness_is_in_is_not_handed_on(
    commands: Commands, slurm: SlurmCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its restarts, memory and filters are its own; which Slurm, and whose account, still count."""
    for name in ("SLURM_RESTART_COUNT", "SLURM_MEM_PER_CPU", "SQUEUE_PARTITION", "SBATCH_WAIT"):
        monkeypatch.setenv(name, "1")
    for name in ("SLURM_CONF", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "kept")
    monkeypatch.delenv("SLURM_JWT", raising=False)
    for command in ("sbatch", "squeue"):
        commands.play(
            command, f"env | grep -E '^(S[A-Z]+)_' > {commands.folder}/{command}.env; echo 7"
        )
    slurm.submit([], "", "mine")
    slurm.states()
    for command in ("sbatch", "squeue"):
        seen = (commands.folder / f"{command}.env").read_text().splitlines()
        given = [line for line in seen if line.startswith(("SLURM_", "SQUEUE_", "SBATCH_"))]
        assert sorted(given) == ["SBATCH_ACCOUNT=kept", "SLURM_CONF=kept"]


def test_states_are_by_name(commands: Commands, slurm: SlurmCalls) -> None:
    """A reason may hold the separator; a line that is no job is passed over."""
    text = (
        "7|RUNNING|None|a\\n8|PENDING|launch failed requeued held|b\\n9|FAILED|x|y|c\\nslurm: hm\\n"
    )
    commands.play("squeue", f"printf '{text}'")
    states = slurm.states()
    assert states["a"] == JobState(7, "RUNNING", "None")
    assert states["b"].stuck
    assert not states["a"].stuck
    assert (states["c"].reason, states["c"].ended) == ("x|y", True)
    assert set(states) == {"a", "b", "c"}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"])
def test_a_state_that_may_change_is_no_end(state: str) -> None:
    """What Slurm may still start, or is still ending, is waited for."""
    assert not JobState(1, state, "None").ended


def test_accounting_is_asked_first(commands: Commands, slurm: SlurmCalls) -> None:
    """sacct says who cancelled a job; the last start of ours counts, never another's job."""
    rows = "PREEMPTED|0:0|n1|mine\\nCANCELLED by 1000|0:15|n2|mine\\nFAILED|1:0|n3|other\\n"
    commands.play("sacct", f"printf '{rows}'")
    text = "sacct: CANCELLED by 1000, exit code 0:15, nodes n2"
    assert slurm.account(9, "mine") == Account("CANCELLED", text, 0)


def test_without_accounting_the_controller_is_asked(commands: Commands, slurm: SlurmCalls) -> None:
    """scontrol knows a job for a while; the same id under another name is not ours."""
    commands.play("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    line = "JobId=9 JobName=mine JobState=NODE_FAIL Reason=NodeDown ExitCode=0:15 NodeList=n[1-2] "
    commands.play("scontrol", f"echo '{line}'")
    assert slurm.account(9, "mine") == Account(
        "NODE_FAIL", "scontrol: NODE_FAIL, reason NodeDown, exit code 0:15, nodes n[1-2]", 0
    )
    assert slurm.account(9, "another") == Account()


def test_jobs_are_cancelled_by_id_or_by_name(commands: Commands, slurm: SlurmCalls) -> None:
    """A job whose id never came back is cancelled by its name."""
    slurm.cancel(job_ids=[4, 5], names=["mine"])
    user = os.getuid()
    assert commands.calls == ["scancel --quiet 4 5", f"scancel --quiet --user={user} --name=mine"]
