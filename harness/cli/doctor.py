"""What this machine can run, and what is missing for the rest."""

import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import psutil
from rich.console import Console

from harness.machine import Machine, default_slots, describe
from harness.provenance import package_version
from harness.records import ExitCode, Json
from harness.runner.display import cell, make_console, plain_table
from harness.store.verify import DEFAULT_OUT

State = Literal["ok", "warn", "missing"]
Purpose = Literal["cpu", "cuda", "te"]

GIB = 1 << 30
MIN_DISK_BYTES = 1 * GIB
MIN_MEMORY_BYTES = 2 * GIB
MIN_SHM_BYTES = 64 << 20
MIN_OPEN_FILES = 1024
TORCH_RELEASES = ((2, 11), (2, 13))
"""First and last release of torch that is tested."""


@dataclass(frozen=True, kw_only=True)
class Finding(Json):
    """One thing looked at. `purpose` is what cannot run where it is missing."""

    name: str
    state: State
    detail: str
    purpose: Purpose


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Json):
    """All findings, and what follows: slots a device, and what cannot run with the reason."""

    machine: Machine
    findings: tuple[Finding, ...]
    can_run: tuple[str, ...]
    cannot_run: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether scenarios can run at all."""
        return bool(self.can_run)


def diagnose(machine: Machine, out: Path) -> Diagnosis:
    """Look at everything that a run needs; `out` is where run folders would go."""
    findings = (
        _python(),
        _torch(),
        _fork(),
        _proc(),
        _loopback(),
        _open_files(),
        _memory(),
        _disk(out),
        _shared_memory(Path("/dev/shm")),
        _gpus(machine),
        _transformer_engine(),
    )
    lacks: dict[str, list[str]] = {"cpu": [], "cuda": [], "te": []}
    needs: dict[str, tuple[str, ...]] = {
        "cpu": ("cpu",), "cuda": ("cpu", "cuda"), "te": ("cpu", "cuda", "te"),
    }  # fmt: skip
    for purpose, wanted in needs.items():
        lacks[purpose] = [
            f"{finding.name}: {finding.detail}"
            for finding in findings
            if finding.state == "missing" and finding.purpose in wanted
        ]
    words: dict[str, Callable[[], str]] = {
        "cpu": lambda: f"device: cpu, {default_slots(machine)} rank slots",
        "cuda": lambda: f"device: cuda, {len(machine.gpus)} GPUs",
        "te": lambda: "backend: te",
    }
    names = {"cpu": "device: cpu", "cuda": "device: cuda", "te": "backend: te"}
    return Diagnosis(
        machine=machine,
        findings=findings,
        can_run=tuple(words[purpose]() for purpose in needs if not lacks[purpose]),
        cannot_run=tuple(
            f"{names[purpose]} ({'; '.join(lacks[purpose])})" for purpose in needs if lacks[purpose]
        ),
    )


def _finding(name: str, purpose: Purpose, state: State, detail: str) -> Finding:
    return Finding(name=name, purpose=purpose, state=state, detail=detail)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    tested = sys.version_info[:2] in ((3, 11), (3, 12))
    detail = version if tested else f"{version}, tested with 3.11 and 3.12"
    return _finding("python", "cpu", "ok" if tested else "warn", detail)


def _torch() -> Finding:
    version = package_version("torch")
    if not version:
        return _finding("torch", "cpu", "missing", "not installed")
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    first, last = TORCH_RELEASES
    if first <= release <= last:
        return _finding("torch", "cpu", "ok", version)
    span = " to ".join(".".join(map(str, release)) for release in TORCH_RELEASES)
    return _finding("torch", "cpu", "warn", f"{version}, tested with {span}")


def _fork() -> Finding:
    if hasattr(os, "fork"):
        return _finding("fork", "cpu", "ok", "processes can be forked")
    return _finding("fork", "cpu", "missing", "this system cannot fork; use Linux")


def _proc() -> Finding:
    if Path("/proc/self/stat").is_file():
        return _finding("/proc", "cpu", "ok", "mounted")
    return _finding("/proc", "cpu", "missing", "not mounted; processes are found through it")


def _loopback() -> Finding:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
    except OSError as error:
        return _finding("loopback", "cpu", "missing", f"127.0.0.1: {error.strerror}")
    return _finding("loopback", "cpu", "ok", "127.0.0.1 can be listened on")


def _open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = limit == resource.RLIM_INFINITY
    state: State = "ok" if unlimited or limit >= MIN_OPEN_FILES else "warn"
    detail = "no limit" if unlimited else f"limit {limit}"
    return _finding("open files", "cpu", state, detail)


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    state: State = "ok" if free >= MIN_MEMORY_BYTES else "warn"
    return _finding("memory", "cpu", state, f"{free / GIB:.1f} GiB available")


def _disk(out: Path) -> Finding:
    # The nearest folder that exists: out itself may be made by the first run.
    place = next((p for p in (out, *out.resolve().parents) if p.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return _finding("disk", "cpu", "missing", f"{place}: {error.strerror}")
    if not os.access(place, os.W_OK):
        return _finding("disk", "cpu", "missing", f"{place} cannot be written to")
    state: State = "ok" if free >= MIN_DISK_BYTES else "warn"
    return _finding("disk", "cpu", state, f"{free / GIB:.1f} GiB free for {out}")


def _shared_memory(place: Path) -> Finding:
    if not place.is_dir():
        return _finding("shared memory", "cuda", "warn", f"{place} is absent; NCCL uses it")
    total = shutil.disk_usage(place).total
    state: State = "ok" if total >= MIN_SHM_BYTES else "warn"
    return _finding("shared memory", "cuda", state, f"{total / GIB:.2f} GiB in {place}")


def _gpus(machine: Machine) -> Finding:
    if not machine.gpus:
        return _finding("GPU", "cuda", "missing", machine.gpu_note or "none")
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    detail = f"{len(machine.gpus)} x {names}, driver {machine.gpu_driver}"
    if not machine.torch_sees_gpus:
        torch = machine.versions.get("torch", "absent")
        return _finding("GPU", "cuda", "missing", f"{detail}; torch {torch} is not built for it")
    return _finding("GPU", "cuda", "ok", detail)


def _transformer_engine() -> Finding:
    version = package_version("transformer-engine")
    if version:
        return _finding("transformer-engine", "te", "ok", version)
    return _finding("transformer-engine", "te", "missing", "not installed (.[te])")


def _print(console: Console, diagnosis: Diagnosis) -> None:
    """Findings, then what follows from them."""
    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    table = plain_table("", "state", "")
    for finding in diagnosis.findings:
        table.add_row(
            cell(finding.name), cell(finding.state, colours[finding.state]), cell(finding.detail)
        )
    console.print(table)
    for line in diagnosis.can_run:
        console.print(cell(f"can run     {line}", "green"), soft_wrap=True)
    for line in diagnosis.cannot_run:
        console.print(cell(f"cannot run  {line}", "yellow"), soft_wrap=True)


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON value on stdout; messages go to stderr."
)
def doctor(*, as_json: bool) -> int:
    """Say what this machine can run, and what it lacks."""
    diagnosis = diagnose(describe(), DEFAULT_OUT)
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), allow_nan=False))
    else:
        _print(make_console(), diagnosis)
    return ExitCode.PASSED if diagnosis.healthy else ExitCode.NO_VERDICT
