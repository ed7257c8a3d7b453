"""Contracts of harness.cli.doctor."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli import doctor
from harness.cli.doctor import Diagnosis, diagnose
from harness.machine import Gpu, Machine

GPUS = (Gpu(id="GPU-a", name="H", memory_bytes=1), Gpu(id="GPU-b", name="H", memory_bytes=1))


def make(*, gpus: tuple[Gpu, ...] = (), torch: str = "2.13.0") -> Machine:
    """A machine with these GPUs and this torch."""
    return Machine(
        cores=2, memory_bytes=1, system="s", python="3.12", gpus=gpus, gpu_driver="580",
        gpu_note="" if gpus else "no NVIDIA driver", versions={"torch": torch} if torch else {},
    )  # fmt: skip


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that packages are said to have."""
    versions = {"torch": "2.13.0"}
    monkeypatch.setattr(doctor, "package_version", lambda name: versions.get(name, ""))
    return versions


def test_a_laptop_runs_on_the_cpu_and_lacks_the_rest(
    installed: dict[str, str], tmp_path: Path
) -> None:
    """What can run is said with its slots; what cannot, with what is missing."""
    diagnosis = diagnose(make(), tmp_path)
    assert diagnosis.healthy
    assert diagnosis.can_run == ("device: cpu, 8 rank slots",)
    assert diagnosis.cannot_run[0] == "device: cuda (GPU: no NVIDIA driver)"
    assert "transformer-engine: not installed" in diagnosis.cannot_run[1]


def test_a_gpu_machine_with_everything_lacks_nothing(
    installed: dict[str, str], tmp_path: Path
) -> None:
    """With GPUs, a torch built for them and transformer-engine, all can run."""
    installed["transformer-engine"] = "2.17"
    diagnosis = diagnose(make(gpus=GPUS), tmp_path)
    assert diagnosis.cannot_run == ()
    assert diagnosis.can_run == ("device: cpu, 8 rank slots", "device: cuda, 2 GPUs", "backend: te")


def test_gpus_that_torch_cannot_use_do_not_count(installed: dict[str, str], tmp_path: Path) -> None:
    """A CPU build of torch beside GPUs is named as what is missing."""
    diagnosis = diagnose(make(gpus=GPUS, torch="2.13.0+cpu"), tmp_path)
    assert "torch 2.13.0+cpu is not built for it" in diagnosis.cannot_run[0]


def test_without_torch_nothing_runs(installed: dict[str, str], tmp_path: Path) -> None:
    """No torch, no training: the machine is not healthy."""
    del installed["torch"]
    diagnosis = diagnose(make(torch=""), tmp_path)
    assert not diagnosis.healthy
    assert "torch: not installed" in diagnosis.cannot_run[0]


def _state(diagnosis: Diagnosis, name: str) -> str:
    return next(f.state for f in diagnosis.findings if f.name == name)


def test_an_untested_torch_is_a_warning(installed: dict[str, str], tmp_path: Path) -> None:
    """A release outside the tested span still runs, with a warning."""
    installed["torch"] = "3.0.1"
    diagnosis = diagnose(make(), tmp_path)
    assert _state(diagnosis, "torch") == "warn"
    assert diagnosis.healthy


@pytest.mark.parametrize(("free", "state"), [(10 << 20, "warn"), (10 << 30, "ok")])
def test_a_full_disk_is_seen(
    free: int, state: str, installed: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Too little room for a run folder is a warning."""
    usage = SimpleNamespace(free=free, total=free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage)  # type: ignore[attr-defined]
    assert _state(diagnose(make(), tmp_path / "not" / "yet"), "disk") == state


def test_an_out_folder_that_cannot_be_written_is_missing(
    installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can run where nothing can be stored."""
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: False)  # type: ignore[attr-defined]
    diagnosis = diagnose(make(), tmp_path)
    assert _state(diagnosis, "disk") == "missing"
    assert not diagnosis.healthy


def test_a_diagnosis_survives_json(installed: dict[str, str], tmp_path: Path) -> None:
    """`doctor --json` holds all that the table says."""
    diagnosis = diagnose(make(gpus=GPUS), tmp_path)
    assert doctor.Diagnosis.from_json(diagnosis.to_json()) == diagnosis
