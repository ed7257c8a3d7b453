"""What an engine is: runs started and waited for; its slots, its processes, the machine below it.

A run takes one slot a rank; with devices, slot i stands for device i. A run that is `placed` says
itself on which GPU, or pinned to which CPU cores, each rank is, and has the machine to itself.

NCCL refuses two ranks of one communicator on one GPU, as it sees by host and bus. Ranks that share
GPUs are therefore put on hosts of their own, by NCCL_HOSTID: the first rank of each GPU makes up
the first host, the second the next. Hosts talk through sockets: NCCL's own kernels and bits, and
times that mean nothing.
"""

import ctypes
import errno
import importlib
import math
import os
import platform
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import psutil

import harness
from harness.errors import Infrastructure, UsageError
from harness.provenance import HOST_KEY, SHARED_HOST, package_version
from harness.records import Json, RunOutcome, RunSpec

ENTRY = "harness.worker.main:rank_main"
"""What a rank is, `module:function` of a `RankMain`, where nothing else is said."""


class Engine(ABC):
    """Starts runs and says what happened to them; a `with` statement closes it."""

    slots: int  # how many ranks may run at the same time

    @abstractmethod
    def check(self, spec: RunSpec) -> None:
        """Refuse a run that could never start here (`UsageError`): too many ranks, no device."""

    @abstractmethod
    def can_start(self, spec: RunSpec) -> bool:
        """Whether there is room for the run now."""

    @abstractmethod
    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        """Start a run in its own folder; `can_start` must be true.

        Raises `UsageError` as `check`, `Infrastructure` if the engine or the disk refused.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        """Runs that have ended since the last call; empty if none did in time or none is left."""

    @abstractmethod
    def cancel(self) -> None:
        """Kill every run. What they recorded stays; they get no outcome. The next start works."""

    def close(self) -> None:
        """Kill every run and give back what the engine holds."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(kw_only=True)
class ActiveRun:
    """A run under way, and since when, by both clocks."""

    spec: RunSpec
    folder: Path
    attempt: int
    started_unix_s: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.monotonic)


class Slots:
    """Which slots are free, for at most `jobs` runs. Hands out the lowest free ones."""

    def __init__(
        self, num_slots: int, devices: Sequence[str] = (), jobs: int | None = None
    ) -> None:
        if num_slots < 1 or (jobs is not None and jobs < 1):
            raise UsageError(f"expected at least 1 slot and job, got {num_slots}, {jobs}")
        if devices and len(devices) != num_slots:
            raise UsageError(f"expected {num_slots} devices, one a slot, got {len(devices)}")
        self.num_slots = num_slots
        self._devices, self._jobs = tuple(devices), jobs
        self._free = set(range(num_slots))
        self._taken: dict[str, tuple[int, ...]] = {}

    def check(self, spec: RunSpec) -> None:
        if spec.world_size < 1:
            raise UsageError(f"run {spec.key}: expected at least 1 rank, got {spec.world_size}")
        if spec.device == "cuda" and not self._devices:
            raise UsageError(f"run {spec.key} needs {spec.world_size} GPUs, this machine has none")
        if spec.world_size > self.num_slots:
            noun = "GPUs" if spec.device == "cuda" else "slots"
            raise UsageError(
                f"run {spec.key} needs {spec.world_size} {noun}, there are {self.num_slots}"
            )
        if spec.placed:
            self._check_placed(spec)

    def _check_placed(self, spec: RunSpec) -> None:
        if spec.device == "cuda":
            legal = f"a GPU of {', '.join(dict.fromkeys(self._devices))}"
            is_here = set(self._devices).issuperset(spec.placed)
        else:
            cores = os.sched_getaffinity(0)
            legal = f"cores of {core_set(cores)}"
            is_here = all(cores_in(each) <= cores for each in spec.placed)
        if len(spec.placed) != spec.world_size or not is_here:
            raise UsageError(
                f"run {spec.key}: expected {legal} for each of {spec.world_size} ranks, got "
                f"{'; '.join(spec.placed)}"
            )

    def fits(self, spec: RunSpec) -> bool:
        full = self._jobs is not None and len(self._taken) >= self._jobs
        if spec.placed:  # alone: where another run is would be a difference, too
            return not full and not self._taken
        return not full and spec.world_size <= len(self._free)

    def take(self, spec: RunSpec) -> tuple[str, ...]:
        """Take the slots of a run that fits; the devices it may see (none for a run on the CPU)."""
        self.check(spec)
        if spec.key in self._taken or not self.fits(spec):
            raise RuntimeError(f"no room for run {spec.key}, or it is under way")
        mine = tuple(sorted(self._free)[: None if spec.placed else spec.world_size])
        self._free -= set(mine)
        self._taken[spec.key] = mine
        if spec.placed:
            return spec.placed if spec.device == "cuda" else ()
        return tuple(self._devices[slot] for slot in mine) if spec.device == "cuda" else ()

    def pass_on(self, key: str, heir: str) -> None:
        self._taken[heir] = self._taken.pop(key)

    def release(self, key: str) -> None:
        self._free |= set(self._taken.pop(key))


def shared(gpus: Sequence[str], ranks_per_gpu: int) -> tuple[str, ...]:
    """The GPU of each rank slot: every GPU once, then again (`ValueError`: no rank a GPU)."""
    if ranks_per_gpu < 1:
        raise ValueError(f"Expected at least 1 rank a GPU, got {ranks_per_gpu}.")
    return tuple(gpus) * ranks_per_gpu


def core_set(cores: Iterable[int]) -> str:
    """A set of CPU cores as taskset writes it: `0-3,8`."""
    held = sorted(cores)
    starts = [core for core in held if core - 1 not in held]
    ends = [core for core in held if core + 1 not in held]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def cores_in(text: str) -> set[int]:
    """The inverse of `core_set`."""
    pairs = (part.partition("-")[::2] for part in text.split(","))
    return {core for a, b in pairs for core in range(int(a), int(b or a) + 1)}


def gpu_environment(devices: Sequence[str], rank: int) -> dict[str, str]:
    """Variables of one rank: the GPUs that it sees, and its own as LOCAL_RANK.

    `devices`: GPU of each rank, as CUDA_VISIBLE_DEVICES names it; empty for ranks without.
    """
    # CUDA sees no GPU at all where one is named twice.
    seen = list(dict.fromkeys(devices))
    mine = seen.index(devices[rank]) if devices else rank
    found = {"CUDA_VISIBLE_DEVICES": ",".join(seen), "LOCAL_RANK": str(mine)}
    if len(seen) < len(devices):
        host = devices[:rank].count(devices[rank])
        found |= {HOST_KEY: f"{SHARED_HOST}-{host}", "NCCL_SOCKET_IFNAME": "lo"}
    return found


def mps_runs() -> bool:
    """Whether processes that use CUDA here go through MPS: its daemon has made its control pipe."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return os.path.exists(os.path.join(folder, "control"))  # noqa: PTH110, PTH118 - never raises


# --- processes: death with the parent, adoption of orphans, an end to every child -----------------

# A leader or forkserver is a *subreaper*: what its ranks leave behind becomes its own child, even
# in another session. When a parent is killed and cannot clean up, the kernel kills its children;
# what a killed subreaper had adopted is found by a mark in its environment, which children inherit.
GATE_VARIABLE = "HARNESS_GATE"
"""In the environment of a rank that was started early: the descriptor on which to wait for "go"."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def die_with_parent(parent_pid: int, *, gently: bool = False) -> None:
    """Have the kernel end this process when its parent dies: with SIGKILL, or gently SIGTERM."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if gently else signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died between the fork and this call


def wait_for_go() -> float:
    """In a rank that was started early: wait until the run whose devices it takes over has ended.

    Returns when that was, by the monotonic clock; in any other rank -inf, at once.
    """
    if not (fd := os.environ.pop(GATE_VARIABLE, "")):
        return -math.inf
    while not os.read(int(fd), 1):
        signal.pause()  # who was to say "go" is gone: the kernel ends us, too
    os.close(int(fd))
    return time.monotonic()


def wake_as_parent_dies() -> None:
    """Have the kernel send SIGCONT when this process' parent dies: one that is stopped goes on,
    sees that its parent is gone, and cleans up."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Process ids of this process' children, zombies included."""
    try:
        lists = [task / "children" for task in Path("/proc/self/task").iterdir()]
        return [int(pid) for each in lists for pid in each.read_text(encoding="utf-8").split()]
    except FileNotFoundError:  # a kernel that does not list them
        return [pid for pid in psutil.pids() if parent_of(pid) == os.getpid()]


def _stat(pid: int) -> list[str]:
    """Fields of proc(5)'s stat after the command's name; empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command name, in parentheses, may itself hold spaces and parentheses.
    return stat.rpartition(")")[2].split()


def parent_of(pid: int) -> int | None:
    """Parent of `pid`, None if there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def code_of_zombie(pid: int) -> int | None:
    """Exit code (negative: signal) of a process that has ended and was not yet waited for."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields and fields[0] == "Z" else None


def kill_children(spare: Collection[int] = ()) -> None:
    """SIGKILL every child but `spare`, and what they leave behind, and wait for all of them."""
    while doomed := [pid for pid in children() if pid not in spare]:
        for pid in doomed:
            signal_quietly(pid, signal.SIGKILL)
        for pid in doomed:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def kill_marked(mark: str) -> None:
    """SIGKILL every process of ours that has `mark`, NAME=VALUE, in its first environment."""
    for _ in range(10):  # what is killed may have forked meanwhile
        found = [pid for pid in psutil.pids() if pid != os.getpid() and has_mark(pid, mark)]
        if sum(signal_quietly(pid, signal.SIGKILL) for pid in found) == 0:
            return


def has_mark(pid: int, mark: str) -> bool:
    """Whether a process of ours has `mark`, NAME=VALUE, in its first environment."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


class ChildWakeup:
    """A descriptor that becomes readable when a child ends, by SIGCHLD, for a selector to wait on.

    A forked process inherits it and must `disarm` it before anything else, then `close` it.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # A Python-level handler must exist for the descriptor to be written.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    @staticmethod
    def disarm() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)


def signal_quietly(pid: int, number: int) -> bool:
    """Send a signal; False if the process is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def no_process(number: int) -> str:
    """Name of the failure of a fork, by its error number; "" if that is none of the machine's."""
    return "no_process" if number in (errno.EAGAIN, errno.ENOMEM) else ""


def kill_group(leader_pid: int) -> None:
    """SIGKILL a whole process group, if any of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(leader_pid, signal.SIGKILL)


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the forkserver: one OpenMP thread, since a process with threads cannot fork
    safely; one hash seed, so that sets of strings are in the same order in every run."""
    root = Path(harness.__file__).resolve().parent.parent
    paths = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if root.name not in ("site-packages", "dist-packages") and str(root) not in paths:
        paths.append(str(root))
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {"PYTHONHASHSEED": "0", **environ, **fixed}


# --- this machine: cores, memory, GPUs, versions --------------------------------------------------

# Names of machines and people stay out: what is described here goes into reports.
MIN_CPU_SLOTS = 8
SLOTS_PER_CORE = 2
DEVICES, LISTING_S = "/dev", 20.0
HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that leave no GPU on purpose."""
PACKAGES = ("torch", "transformer-engine", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy")


@dataclass(frozen=True, kw_only=True)
class Gpu(Json):
    """One visible GPU. `id` is what CUDA_VISIBLE_DEVICES calls it."""

    id: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine(Json):
    """The machine under us."""

    cores: int
    memory_bytes: int
    system: str
    python: str
    versions: dict[str, str]  # of installed packages
    gpus: tuple[Gpu, ...]
    gpu_driver: str
    gpu_note: str  # why there is no GPU
    gpus_expected: str = ""  # how it is known that there are some, unless hidden on purpose

    @property
    def torch_sees_gpus(self) -> bool:
        """Whether there are GPUs and the installed torch is built for them."""
        return bool(self.gpus) and not self.versions.get("torch", "+cpu").endswith("+cpu")


def describe_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Look at the machine; what cannot be found out is left empty, never an exception."""
    gpus, driver, note = _gpus(environ)
    return Machine(
        cores=num_cores(), memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(), gpus=gpus, gpu_driver=driver, gpu_note=note,
        versions={name: found for name in PACKAGES if (found := package_version(name))},
        gpus_expected=_gpus_expected(environ, gpus),
    )  # fmt: skip


def _gpus_expected(environ: Mapping[str, str], gpus: tuple[Gpu, ...]) -> str:
    hidden = environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in HIDDEN:
        return ""
    if gpus:
        return f"the driver reports {len(gpus)} x {gpus[0].name}"
    if nodes := sorted(Path(DEVICES).glob("nvidia[0-9]*")):
        return f"{nodes[0]} is there"
    try:
        listed = subprocess.check_output(["nvidia-smi", "-L"], text=True, timeout=LISTING_S,
                                         stderr=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return "nvidia-smi lists GPUs" if listed.strip().startswith("GPU ") else ""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def resolve_device(wanted: str, machine: Machine) -> Literal["cpu", "cuda"]:
    """The device that `auto`, `cpu` or `cuda` means here.

    `Infrastructure`: cuda was asked for and cannot be had, or there are GPUs that `auto` cannot
    take: that a run on them passes would not be known from one on the CPU.
    """
    if wanted == "cpu":
        return "cpu"
    if machine.torch_sees_gpus:
        return "cuda"
    why = machine.gpu_note or f"the installed torch is {machine.versions.get('torch', 'absent')}"
    if wanted == "auto" and machine.gpus_expected:
        raise Infrastructure(
            f"device: auto: expected GPUs that can be used, as {machine.gpus_expected}, but {why}; "
            "say --device cpu to run on the CPU"
        )
    if wanted == "cuda":
        raise Infrastructure(f"device: expected a GPU, got none ({why}); legal values: auto, cpu")
    return "cpu"


def default_slots(machine: Machine) -> int:
    """How many ranks run on the CPU at a time: at least 8, or 2 a core."""
    return max(MIN_CPU_SLOTS, SLOTS_PER_CORE * machine.cores)


def visible(gpus: tuple[Gpu, ...], devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, stops at a bad entry."""
    if devices is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in map(str.strip, devices.split(",")):
        named = [gpu for n, gpu in enumerate(gpus) if entry == str(n) or
                 (entry and not entry.isdecimal() and gpu.id.startswith(entry))]  # fmt: skip
        if not named or named[0] in chosen:
            break
        chosen.append(named[0])
    return tuple(chosen)


def _gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str, str]:
    """Visible GPUs, driver version, and why there are none."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return (), "", "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), "", f"no NVIDIA driver: {error}"
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        found = tuple(
            Gpu(id=_text(pynvml.nvmlDeviceGetUUID(handle)),
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in handles
        )  # fmt: skip
    except pynvml.NVMLError as error:
        return (), "", f"the NVIDIA driver does not answer: {error}"
    finally:
        pynvml.nvmlShutdown()
    devices = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible(found, devices)
    note = "" if gpus else f"CUDA_VISIBLE_DEVICES={devices} leaves none of {len(found)}"
    return gpus, driver, note if found else "no GPU"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
