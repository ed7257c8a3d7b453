"""Contracts of harness.machine."""

import dataclasses
import importlib
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import machine, provenance
from harness.errors import Infrastructure
from harness.machine import Gpu, Machine, default_slots, describe, resolve_device, visible

GPUS = tuple(Gpu(id=f"GPU-{letter}{letter}", name="G", memory_bytes=1) for letter in "abcd")


def make(*, gpus: tuple[Gpu, ...] = (), torch: str = "2.13.0", cores: int = 2) -> Machine:
    """A machine with these GPUs and this torch."""
    return Machine(
        cores=cores, memory_bytes=1, system="s", python="3.12", gpus=gpus, gpu_driver="",
        gpu_note="" if gpus else "no NVIDIA driver", versions={"torch": torch} if torch else {},
    )  # fmt: skip


def test_describe_works_anywhere_and_names_nobody() -> None:
    """This machine can be described, as JSON too, and its host name is left out."""
    here = describe()
    assert here.cores >= 1
    assert here.memory_bytes > 1 << 20
    assert Machine.from_json(here.to_json()) == here
    assert socket.gethostname() not in str(here.to_json())


@pytest.mark.parametrize(
    ("wanted", "here", "device"),
    [
        ("auto", make(), "cpu"),
        ("auto", make(gpus=GPUS), "cuda"),
        ("cpu", make(gpus=GPUS), "cpu"),
        ("cuda", make(gpus=GPUS), "cuda"),
    ],
)
def test_auto_takes_the_gpu_if_torch_can(wanted: str, here: Machine, device: str) -> None:
    """`auto` is cuda where GPUs and a torch built for them are; cpu is always cpu."""
    assert resolve_device(wanted, here) == device


def test_auto_does_not_fall_back_where_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that does not answer, or a torch without CUDA, is refused; hidden GPUs are not."""
    monkeypatch.setattr(machine, "DEVICES", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    _use(_nvml(init=False), monkeypatch)
    assert resolve_device("auto", describe({})) == "cpu"
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\n")
    smi.chmod(0o755)
    with pytest.raises(Infrastructure, match=r"nvidia-smi lists GPUs, but .* --device cpu"):
        resolve_device("auto", describe({}))
    smi.unlink()
    (tmp_path / "nvidiactl").touch()
    assert resolve_device("auto", describe({})) == "cpu"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(Infrastructure, match=r"nvidia0 is there, but .* --device cpu"):
        resolve_device("auto", describe({}))
    assert resolve_device("cpu", describe({})) == "cpu"
    assert resolve_device("auto", describe({"CUDA_VISIBLE_DEVICES": ""})) == "cpu"
    without = dataclasses.replace(
        make(gpus=GPUS, torch="2.13.0+cpu"), gpus_expected="the driver reports 4 x G"
    )
    with pytest.raises(Infrastructure, match=r"the installed torch is 2\.13\.0\+cpu"):
        resolve_device("auto", without)


@pytest.mark.parametrize("here", [make(), make(gpus=GPUS, torch="2.13.0+cpu"), make(torch="")])
def test_cuda_is_never_replaced_by_the_cpu(here: Machine) -> None:
    """A scenario that says cuda does not pass on a machine without."""
    with pytest.raises(Infrastructure, match="expected a GPU, got none"):
        resolve_device("cuda", here)


def test_slots_are_gpus_or_at_least_eight() -> None:
    """One rank a GPU; on the CPU two a core, at least eight."""
    assert default_slots(make(cores=2)) == 8
    assert default_slots(make(cores=32)) == 64


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, "abcd"), ("", ""), ("0", "a"), ("2,0", "ca"), ("1,9,0", "b"), ("-1", ""),
        ("GPU-cc,GPU-a", "ca"), ("0,0", "a"), ("x", ""), (" 3 , 1 ", "db"),
    ],
)  # fmt: skip
def test_visible_devices_are_read_as_cuda_does(devices: str | None, expected: str) -> None:
    """Order counts, and the list ends at the first entry that names nothing."""
    assert "".join(gpu.id[-1] for gpu in visible(GPUS, devices)) == expected


class _NvmlError(Exception):
    pass


def _nvml(*, init: bool = True, answers: bool = True) -> Any:
    """A stand-in for pynvml with two GPUs."""

    def start() -> None:
        if not init:
            raise _NvmlError("no library")

    def driver() -> bytes:
        if not answers:
            raise _NvmlError("lost")
        return b"580.1"

    return SimpleNamespace(
        NVMLError=_NvmlError, nvmlInit=start, nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=driver, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetUUID=lambda i: f"GPU-{i}",
        nvmlDeviceGetName=lambda i: "H", nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=7),
    )  # fmt: skip


def _use(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module",
        lambda name: module if name == "pynvml" else real(name),
    )  # fmt: skip


def test_gpus_are_found_through_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, memory and driver come from NVML, the choice from CUDA_VISIBLE_DEVICES."""
    _use(_nvml(), monkeypatch)
    here = describe({"CUDA_VISIBLE_DEVICES": "1"})
    assert here.gpus == (Gpu(id="GPU-1", name="H", memory_bytes=7),)
    assert (here.gpu_driver, here.gpu_note) == ("580.1", "")
    hidden = describe({"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.gpus == ()
    assert hidden.gpu_note == "CUDA_VISIBLE_DEVICES= leaves none of 2"


@pytest.mark.parametrize(
    ("module", "note"),
    [(_nvml(init=False), "no NVIDIA driver"), (_nvml(answers=False), "does not answer")],
)
def test_a_driver_in_trouble_is_a_note(
    module: Any, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state of the driver makes describing the machine fail."""
    _use(module, monkeypatch)
    here = describe({})
    assert here.gpus == ()
    assert note in here.gpu_note


def test_without_the_binding_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """pynvml is not required."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert describe({}).gpu_note == "nvidia-ml-py is not installed"


def test_an_absent_package_has_no_version() -> None:
    """Asking for a package that is not there is no error."""
    assert provenance.package_version("no-such-package-at-all") == ""
