"""A real Slurm for tests: munged, slurmctld and a slurmd a node, all on this machine's loopback.

    LocalSlurm.missing()     why it cannot be had here, or ""
    with LocalSlurm(folder)  configured, started, up; at the end every process of it is gone

No systemd, no cgroups, no database, no root needed. Nodes n1, n2, ... share this machine's address
and differ by port; processors and GPUs are declared, not looked for. Daemons die with the process
that started them.
"""

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from harness.engine.machine import die_with_parent

PROGRAMS = ("munged", "slurmctld", "slurmd", "salloc", "srun", "squeue", "scontrol", "scancel")
PACKAGE = "slurm-wlm"
START_LIMIT_S = 300.0
CALL_LIMIT_S = 120.0
STOP_LIMIT_S = 10.0
"""The first two are reached only if something is wrong; then daemons are killed."""

CONFIGURATION = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for its old credential to expire: two minutes, if not told otherwise.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
# Nodes declare more processors than the machine has, and come back after a fault by themselves.
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
MinJobAge=86400
JobRequeue=1
KillWait=8
CompleteWait=0
InactiveLimit=0
# A machine that is busy with other tests must not look like one that has failed.
UnkillableStepTimeout=120
SlurmctldTimeout=300
SlurmdTimeout=300
MessageTimeout=10
TCPTimeout=2
"""


class LocalSlurm:
    """One private cluster below `folder`, whose path must be short: sockets lie in it."""

    def __init__(self, folder: Path, nodes: int = 4, cpus: int = 8, gpus: int = 2) -> None:
        self.folder, self.nodes = folder, [f"n{i + 1}" for i in range(nodes)]
        self.variables = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.started_in_s = 0.0
        self._cpus, self._gpus = cpus, gpus
        self._port = _free_ports(nodes + 1)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def missing() -> str:
        """Why there can be no Slurm on this machine; "" if there can."""
        path = _daemon_path()
        absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
        return f"needs {', '.join(absent)} (Debian: apt-get install {PACKAGE})" if absent else ""

    def __enter__(self) -> Self:
        began = time.monotonic()
        try:
            self._configure()
            self._start("munged", self._munge_options())
            self._until(lambda: (self.folder / "munge" / "socket").exists(), "munged")
            self.start_controller()
            for name in self.nodes:
                self.start_node(name)
            self._until(lambda: self.idle() == self.nodes, "all nodes")
        except BaseException:
            self._stop()
            raise
        self.started_in_s = time.monotonic() - began
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def call(self, *command: str, check: bool = True) -> str:
        """Standard output of a Slurm command."""
        done = subprocess.run(
            command, env=self._environment(), capture_output=True, text=True,
            timeout=CALL_LIMIT_S, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stderr)
        return done.stdout

    def idle(self) -> list[str]:
        """Nodes that are up with nothing to do."""
        return sorted(self.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split())

    def start_controller(self) -> None:
        """Start slurmctld, again if need be, by the main thread: it dies with who started it."""
        self._start("slurmctld", ["-D", "-i"])

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self._start("slurmd", ["-D", "-N", name], name)

    def kill(self, daemon: str) -> None:
        """SIGKILL `slurmctld` or a node's slurmd, by the node's name."""
        process = self._daemons.pop(daemon)
        process.kill()
        process.wait()

    def wait_idle(self) -> None:
        """Wait until no job is left and every node is idle."""
        self._until(lambda: self.idle() == self.nodes, "idle nodes")

    # --- inside -------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables, "PATH": _daemon_path()}

    def _configure(self) -> None:
        for name in ("state", "gpus", "munge", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir(mode=0o755)
        user = os.environ.get("USER", "") or str(os.getuid())
        host = socket.gethostname().split(".")[0]
        text = CONFIGURATION.format(
            host=host, port=self._port, folder=self.folder, user=_user_name(user)
        )
        for i, node in enumerate(self.nodes):
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={self._port + 1 + i} "
                f"CPUs={self._cpus} RealMemory=1000 Gres=gpu:{self._gpus} State=UNKNOWN\n"
            )
        names = ",".join(self.nodes)
        text += f"PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(text)
        # The file of a GPU must be a character device; it is never opened.
        for i in range(self._gpus):
            (self.folder / "gpus" / f"gpu{i}").symlink_to("/dev/null")
        files = f"{self.folder}/gpus/gpu[0-{self._gpus - 1}]"
        (self.folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File={files}\n")
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))

    def _munge_options(self) -> list[str]:
        place = self.folder / "munge"
        named = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={place / name}" for option, name in named.items()]
        return ["-F", "--force", f"--log-file={place / 'log'}", *options]

    def _start(self, program: str, options: Sequence[str], name: str = "") -> None:
        log = (self.folder / f"{name or program}.out").open("ab")
        mine = os.getpid()
        found = shutil.which(program, path=_daemon_path())
        assert found is not None
        with log:
            self._daemons[name or program] = subprocess.Popen(
                [found, *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(),
                start_new_session=True, preexec_fn=lambda: _become_daemon(mine),
            )  # fmt: skip

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not done():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                said = "; ".join(f"{name}: {self._last_words(name)}" for name in dead)
                raise RuntimeError(f"Slurm is not up: {what} missing; {said or 'no daemon died'}")
            time.sleep(0.02)

    def _last_words(self, name: str) -> str:
        lines = (self.folder / f"{name}.out").read_text(errors="replace").strip().split("\n")
        return lines[-1]

    def _stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        for pid in self.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def strays(self) -> Iterator[int]:
        """Processes that Slurm started and that outlive it, by our configuration and a job's number
        in their environment."""
        ours = f"SLURM_CONF={self.variables['SLURM_CONF']}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            in_job = any(v.startswith(b"SLURM_JOB_ID=") for v in variables)
            if ours in variables and (in_job or b"slurmstepd" in command):
                yield int(entry.name)


def _become_daemon(parent_pid: int) -> None:
    die_with_parent(parent_pid)
    # Jobs inherit it: a rank that is made to crash leaves no core where the tests were started.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _daemon_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"


def _user_name(name: str) -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return name


def _free_ports(count: int) -> int:
    """First of `count` ports in a row that nobody listens on."""
    for base in range(17000 + os.getpid() % 1000 * 8, 32000, 8):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + count):
                    taken = stack.enter_context(socket.socket())
                    taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return base
    raise RuntimeError("no free ports for a Slurm")
