"""`harness doctor`: what this machine can run, and what is missing for the rest."""

import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import click
import psutil

from harness.cli import options
from harness.machine import Machine, default_slots, describe
from harness.provenance import package_version
from harness.records import ExitCode
from harness.store.verify import DEFAULT_OUT
from harness.terminal import add_row, cell, make_console, plain_table

State = Literal["ok", "warn", "missing"]
Purpose = Literal["cpu", "cuda", "te"]
COLOURS: dict[State, str] = {"ok": "green", "warn": "yellow", "missing": "red"}
GIB = 1 << 30
MIN_DISK_BYTES, MIN_MEMORY_BYTES, MIN_SHM_BYTES = 1 * GIB, 2 * GIB, 64 << 20
MIN_OPEN_FILES = 1024
TESTED = {"python": ((3, 11), (3, 12)), "torch": ((2, 11), (2, 13))}
"""First and last release that is tested."""


class Finding(NamedTuple):
    """One thing looked at. `purpose` is what cannot run where it is missing."""

    purpose: Purpose
    name: str
    state: State
    detail: str


class Diagnosis(NamedTuple):
    """All findings, and what follows: slots a device, and what cannot run with the reason."""

    findings: list[Finding]
    can_run: list[str]
    cannot_run: list[str]


def diagnose(machine: Machine, out: Path) -> Diagnosis:
    """Look at everything that a run needs; `out` is where run folders would go."""
    found = Diagnosis([Finding(*looked) for looked in _look(machine, out)], [], [])
    lacks: list[str] = []  # each needs what those before it need
    for purpose, name, room in (
        ("cpu", "device: cpu", f", {default_slots(machine)} rank slots"),
        ("cuda", "device: cuda", f", {len(machine.gpus)} GPUs"),
        ("te", "backend: te", ""),
    ):
        lacks += [f"{f.name}: {f.detail}" for f in found.findings
                  if f.state == "missing" and f.purpose == purpose]  # fmt: skip
        if lacks:
            found.cannot_run.append(f"{name} ({'; '.join(lacks)})")
        else:
            found.can_run.append(name + room)
    return found


def _look(machine: Machine, out: Path) -> Iterator[tuple[Purpose, str, State, str]]:
    versions = {"python": sys.version.split()[0], "torch": package_version("torch")}
    for name, version in versions.items():
        first, last = TESTED[name]
        parts = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        span = " to ".join(".".join(map(str, release)) for release in (first, last))
        if not version:
            yield "cpu", name, "missing", "not installed"
        elif first <= parts <= last:
            yield "cpu", name, "ok", version
        else:
            yield "cpu", name, "warn", f"{version}, tested with {span}"
    is_linux = hasattr(os, "fork") and Path("/proc/self/stat").is_file()
    needs = "fork and /proc" if is_linux else "no fork, or /proc is not mounted; use Linux"
    yield "cpu", "processes", "ok" if is_linux else "missing", needs
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield "cpu", "loopback", "ok", "127.0.0.1 can be listened on"
    except OSError as error:
        yield "cpu", "loopback", "missing", f"127.0.0.1: {error.strerror}"
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES
    yield "cpu", "open files", "ok" if enough else "warn", f"limit {limit}"
    free = psutil.virtual_memory().available
    state: State = "ok" if free >= MIN_MEMORY_BYTES else "warn"
    yield "cpu", "memory", state, f"{free / GIB:.1f} GiB available"
    yield "cpu", "disk", *_disk(out)
    shm = Path("/dev/shm")
    total = shutil.disk_usage(shm).total if shm.is_dir() else 0
    yield ("cuda", "shared memory", "ok" if total >= MIN_SHM_BYTES else "warn",
           f"{total / GIB:.2f} GiB in {shm}, which NCCL uses")  # fmt: skip
    yield "cuda", "GPU", *_gpus(machine)
    te = package_version("transformer-engine")
    yield "te", "transformer-engine", "ok" if te else "missing", te or "not installed (.[te])"


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
    here = describe()
    diagnosis = diagnose(here, DEFAULT_OUT)
    code = ExitCode.PASSED if diagnosis.can_run else ExitCode.NO_VERDICT
    if as_json:
        findings = [found._asdict() for found in diagnosis.findings]
        plain = diagnosis._asdict() | {"findings": findings, "machine": here.to_json()}
        options.print_json(plain)
        return code
    console, table = make_console(), plain_table("", "state", "")
    for found in diagnosis.findings:
        add_row(table, found.name, cell(found.state, COLOURS[found.state]), found.detail)
    console.print(table)
    for line in diagnosis.can_run:
        console.print(cell(f"can run     {line}", "green"), soft_wrap=True)
    for line in diagnosis.cannot_run:
        console.print(cell(f"cannot run  {line}", "yellow"), soft_wrap=True)
    return code
