"""`harness doctor`: what this machine can run, and what is missing for the rest."""

import json
import os
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
import psutil

from harness.cli import options
from harness.machine import Machine, default_slots, describe
from harness.provenance import package_version
from harness.records import ExitCode, Json
from harness.store.verify import DEFAULT_OUT
from harness.terminal import cell, make_console, plain_table

State = Literal["ok", "warn", "missing"]
Purpose = Literal["cpu", "cuda", "te"]
COLOURS: dict[State, str] = {"ok": "green", "warn": "yellow", "missing": "red"}
GIB = 1 << 30
MIN_DISK_BYTES, MIN_MEMORY_BYTES, MIN_SHM_BYTES = 1 * GIB, 2 * GIB, 64 << 20
MIN_OPEN_FILES = 1024
PYTHONS = ((3, 11), (3, 12))
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
    looked = {
        ("python", "cpu"): _python(),
        ("torch", "cpu"): _torch(),
        ("fork", "cpu"): ("ok", "processes can be forked") if hasattr(os, "fork")
        else ("missing", "this system cannot fork; use Linux"),
        ("/proc", "cpu"): ("ok", "mounted") if Path("/proc/self/stat").is_file()
        else ("missing", "not mounted; processes are found through it"),
        ("loopback", "cpu"): _loopback(),
        ("open files", "cpu"): _open_files(),
        ("memory", "cpu"): _memory(),
        ("disk", "cpu"): _disk(out),
        ("shared memory", "cuda"): _shared_memory(Path("/dev/shm")),
        ("GPU", "cuda"): _gpus(machine),
        ("transformer-engine", "te"): ("ok", version)
        if (version := package_version("transformer-engine"))
        else ("missing", "not installed (.[te])"),
    }  # fmt: skip
    findings = tuple(
        Finding(name=name, purpose=purpose, state=state, detail=detail)  # type: ignore[arg-type]
        for (name, purpose), (state, detail) in looked.items()
    )
    words = {
        "cpu": ("device: cpu", f", {default_slots(machine)} rank slots"),
        "cuda": ("device: cuda", f", {len(machine.gpus)} GPUs"),
        "te": ("backend: te", ""),
    }
    can, cannot = [], []
    for number, (name, room) in enumerate(words.values(), 1):
        needed = [*words][:number]  # each needs what those before it need
        lacks = [f"{f.name}: {f.detail}" for f in findings
                 if f.state == "missing" and f.purpose in needed]  # fmt: skip
        if lacks:
            cannot.append(f"{name} ({'; '.join(lacks)})")
        else:
            can.append(name + room)
    return Diagnosis(
        machine=machine, findings=findings, can_run=tuple(can), cannot_run=tuple(cannot)
    )


def _python() -> tuple[State, str]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in PYTHONS:
        return "ok", version
    return "warn", f"{version}, tested with 3.11 and 3.12"


def _torch() -> tuple[State, str]:
    version = package_version("torch")
    if not version:
        return "missing", "not installed"
    first, last = TORCH_RELEASES
    if first <= tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) <= last:
        return "ok", version
    span = " to ".join(".".join(map(str, release)) for release in TORCH_RELEASES)
    return "warn", f"{version}, tested with {span}"


def _loopback() -> tuple[State, str]:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
    except OSError as error:
        return "missing", f"127.0.0.1: {error.strerror}"
    return "ok", "127.0.0.1 can be listened on"


def _open_files() -> tuple[State, str]:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return "ok", "no limit"
    return "ok" if limit >= MIN_OPEN_FILES else "warn", f"limit {limit}"


def _memory() -> tuple[State, str]:
    free = psutil.virtual_memory().available
    return "ok" if free >= MIN_MEMORY_BYTES else "warn", f"{free / GIB:.1f} GiB available"


def _disk(out: Path) -> tuple[State, str]:
    # The nearest folder that exists: out itself may be made by the first run.
    place = next((p for p in (out, *out.resolve().parents) if p.is_dir()), Path("/"))
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return "missing", f"{place}: {error.strerror}"
    if not os.access(place, os.W_OK):
        return "missing", f"{place} cannot be written to"
    return "ok" if free >= MIN_DISK_BYTES else "warn", f"{free / GIB:.1f} GiB free for {out}"


def _shared_memory(place: Path) -> tuple[State, str]:
    if not place.is_dir():
        return "warn", f"{place} is absent; NCCL uses it"
    total = shutil.disk_usage(place).total
    return "ok" if total >= MIN_SHM_BYTES else "warn", f"{total / GIB:.2f} GiB in {place}"


def _gpus(machine: Machine) -> tuple[State, str]:
    if not machine.gpus:
        return "missing", machine.gpu_note or "none"
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    detail = f"{len(machine.gpus)} x {names}, driver {machine.gpu_driver}"
    if machine.torch_sees_gpus:
        return "ok", detail
    torch = machine.versions.get("torch", "absent")
    return "missing", f"{detail}; torch {torch} is not built for it"


@click.command()
@options.as_json
def doctor(*, as_json: bool) -> int:
    """Say what this machine can run, and what it lacks."""
    diagnosis = diagnose(describe(), DEFAULT_OUT)
    code = ExitCode.PASSED if diagnosis.healthy else ExitCode.NO_VERDICT
    if as_json:
        click.echo(json.dumps(diagnosis.to_json(), allow_nan=False))
        return code
    console, table = make_console(), plain_table("", "state", "")
    for found in diagnosis.findings:
        table.add_row(cell(found.name), cell(found.state, COLOURS[found.state]), cell(found.detail))
    console.print(table)
    for line in diagnosis.can_run:
        console.print(cell(f"can run     {line}", "green"), soft_wrap=True)
    for line in diagnosis.cannot_run:
        console.print(cell(f"cannot run  {line}", "yellow"), soft_wrap=True)
    return code
