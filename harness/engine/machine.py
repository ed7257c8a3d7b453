"""The machine below an engine: its GPUs, CPU cores and packages, and which of them a rank sees.

NCCL refuses two ranks of one communicator on one GPU, as it sees by host and bus. Ranks that share
GPUs are therefore put on hosts of their own, by NCCL_HOSTID: the first rank of each GPU makes up
the first host, the second the next. Hosts talk through sockets: NCCL's own kernels and bits, and
times that mean nothing.
"""

import importlib
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from harness.errors import Infrastructure
from harness.provenance import HOST_KEY, SHARED_HOST, package_version
from harness.records import Json


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
