"""Contracts of harness.cli.suite."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli import suite
from harness.cli.suite import conclude, look
from harness.engine.machine import Gpu, Machine
from tests.support.fake_engine import Patch

GPUS = tuple(Gpu(id=f"GPU-{name}", name="H", memory_bytes=1) for name in "ab")
CPU, TWO = "device: cpu, 8 rank slots", "device: cuda, 2 GPUs"


def machine(gpus: tuple[Gpu, ...], torch: str) -> Machine:
    return Machine(
        cores=2, memory_bytes=1, system="s", python="3.12", gpus=gpus, gpu_driver="580",
        gpu_note="" if gpus else "no NVIDIA driver", versions={"torch": torch} if torch else {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "torch", "te", "can", "lacks"),
    [
        ((), "2.13.0", "", [CPU],
         ["device: cuda (GPU: no NVIDIA driver)", "transformer-engine: not installed"]),
        (GPUS, "2.13.0", "2.17", [CPU, TWO, "backend: te"], []),
        (GPUS, "2.13.0+cpu", "2.17", [CPU],
         ["torch 2.13.0+cpu is not built for it", "backend: te (GPU: "]),
        (GPUS, "", "2.17", [], ["torch: not installed"] * 3),
    ],
)  # fmt: skip
def test_what_can_run_and_what_is_missing(
    gpus: tuple[Gpu, ...], torch: str, te: str, can: list[str], lacks: list[str],
    monkeypatch: Patch, tmp_path: Path,
) -> None:  # fmt: skip
    """Slots of each device; of what cannot run, what it lacks."""
    versions = {"torch": torch, "transformer-engine": te}
    monkeypatch.setattr(suite, "package_version", lambda name: versions.get(name, ""))
    here = machine(gpus, torch)
    can_run, cannot_run = conclude(look(here, tmp_path), here)
    assert can_run == can
    assert all(why in line for why, line in zip(lacks, cannot_run, strict=True))


@pytest.mark.parametrize(
    ("name", "patches", "state"),
    [
        ("torch", {"package_version": lambda name: "3.0.1"}, "warn"),
        ("disk", {"shutil.disk_usage": lambda _: SimpleNamespace(free=10 << 20, total=1)}, "warn"),
        ("disk", {"shutil.disk_usage": lambda _: SimpleNamespace(free=10 << 30, total=1)}, "ok"),
        ("disk", {"os.access": lambda place, mode: False}, "missing"),
    ],
)  # fmt: skip
def test_each_finding_has_its_state(
    name: str, patches: dict[str, Any], state: str, monkeypatch: Patch, tmp_path: Path
) -> None:
    """An untested torch and a full disk are warnings; nothing runs where nothing can be stored."""
    for place, value in patches.items():
        monkeypatch.setattr(f"harness.cli.suite.{place}", value)
    here = machine((), "2.13.0")
    found = list(look(here, tmp_path / "not" / "yet"))
    assert next(each for _, known, each, _ in found if known == name) == state
    assert bool(conclude(found, here)[0]) == (state != "missing")
