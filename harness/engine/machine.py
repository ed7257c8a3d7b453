"""The machine below an engine: its GPUs, cores, packages and processes, and what a rank sees of it.

NCCL refuses two ranks of one communicator on one GPU, as it sees by host and bus. Ranks that share
GPUs are therefore put on hosts of their own, by NCCL_HOSTID: the first rank of each GPU makes up
the first host, the second the next. Hosts talk through sockets: NCCL's own kernels and bits, and
times that mean nothing.

A leader or forkserver is a *subreaper*: what its ranks leave behind becomes its own child, even in
another session. When a parent is killed and cannot clean up, the kernel kills its children; what a
killed subreaper had adopted is found by a mark in its environment, which children inherit.
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
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import harness
from harness.errors import Infrastructure
from harness.provenance import HOST_KEY, SHARED_HOST, package_version
from harness.records import Device, Json


def shared(gpus: Sequence[str], ranks_per_gpu: int) -> tuple[str, ...]:
    """The GPU of each rank slot: every GPU once, then again."""
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


def resolve_device(wanted: str, machine: Machine) -> Device:
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
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        found = tuple(
            Gpu(id=str(pynvml.nvmlDeviceGetUUID(handle)),
                name=str(pynvml.nvmlDeviceGetName(handle)),
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


# --- processes of Linux: death with the parent, adoption of orphans, an end to every child --------

GATE_VARIABLE = "HARNESS_GATE"
"""In the environment of a rank that was started early: the descriptor on which to wait for "go"."""
MOST_LOOKS, LOOK_S = 20, 0.05
ORPHANS_S = 2.0
"""Given to what ranks leave behind: trackers of shared memory unlink what nobody else would."""
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


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP or a debugger holds a process."""
    return _stat(pid)[:1] in (["T"], ["t"])


def code_of_zombie(pid: int) -> int | None:
    """Exit code (negative: signal) of a process that has ended and was not yet waited for."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields and fields[0] == "Z" else None


def await_children() -> None:
    """Reap children as they exit by themselves, for `ORPHANS_S` at most."""
    until_s = time.monotonic() + ORPHANS_S
    while children() and time.monotonic() < until_s:
        with suppress(ChildProcessError):
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(LOOK_S)


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
    for _ in range(MOST_LOOKS):  # what is killed may have forked meanwhile
        marks = {pid: has_mark(pid, mark) for pid in psutil.pids() if pid != os.getpid()}
        marked = [pid for pid, is_marked in marks.items() if is_marked]
        if sum(signal_quietly(pid, signal.SIGKILL) for pid in marked) == 0:
            if None not in marks.values():
                return
            time.sleep(LOOK_S)


def has_mark(pid: int, mark: str) -> bool | None:
    """Whether a process of ours has `mark`, NAME=VALUE, in its first environment.

    None during an exec, when the environment cannot be read yet.
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if not environ and not Path(f"/proc/{pid}/statm").read_text().startswith("0 "):
            return None
    except OSError:
        return False
    return mark.encode() in environ.split(b"\0")


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
