"""`harness list`: scenarios, cases, shards, and whether all are legal; `harness doctor`: what this
machine can run, and what is missing for the rest."""

import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import psutil

from harness import cli
from harness.checks import CHECKS, table
from harness.checks.evidence import count as counted
from harness.cli import PATH, print_json
from harness.engine.machine import Machine, default_slots, describe_machine
from harness.errors import NothingSelected, UsageError
from harness.provenance import package_version
from harness.records import CaseSpec, ExitCode
from harness.scenario.matrix import count as number_of_cases
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario
from harness.scenario.suite import check_files, find_scenarios, load_suite, select
from harness.store.folder import DEFAULT_OUT
from harness.terminal import cell, make_console, print_line, print_table

Listed = dict[str, tuple[int, Sequence[CaseSpec]]]
"""By scenario: the number of its cases, and the cases."""


@click.command("list")
@click.argument("paths", type=PATH, nargs=-1)
@cli.options(cli.keyword, cli.as_json, cli.overrides, cli.chosen)
@click.option(
    "--shards", type=click.IntRange(1, 1000), metavar="N",
    help="Print what each of N shards would run; with --json, a job matrix for CI.",
)  # fmt: skip
@click.option("--checks", is_flag=True,
              help="Print the checks that a scenario may ask for, and their options.")  # fmt: skip
@click.option(
    "--check", is_flag=True, help="Validate every case of every file and print every error."
)
@click.option("--count", is_flag=True, help="Print the number of cases only.")
def list_command(
    *, paths: tuple[Path, ...], keyword: str | None, as_json: bool, check: bool, count: bool,
    checks: bool, sets: tuple[str, ...], axes: tuple[str, ...], **chosen_by: Any,
) -> int:  # fmt: skip
    """List the cases of a scenario; of several, how many each has.

    PATHS are files and folders, scenarios/ by default; FILE::NAME is one of a file's scenarios.
    With -k, --json, --tier, --select or --shard the cases of several are listed, too; the last
    three are those of `harness run`. Counts alone do not check that each case is legal: --check
    does.
    """
    if checks:
        return _show_checks(as_json=as_json)
    overrides, paths = Overrides(sets, axes), paths or (Path("scenarios"),)
    names = ("tiers", "select", "shard", "shards")
    tiers, how, shard, shards = (chosen_by[name] for name in names)
    if shards is not None and shard is not None:
        raise UsageError(f"list --shards {shards}: expected no --shard {shard} with it")
    if check:
        others = {"-k": keyword, "--tier": tiers, "--select": how, "--shard": shard,
                  "--shards": shards, "--count": count}  # fmt: skip
        if option := next((option for option, value in others.items() if value), ""):
            raise UsageError(f"list --check: expected no {option}, as every case is checked")
        return _check(find_scenarios(paths), overrides, as_json=as_json)
    if shards is None and not (tiers or how or shard):
        files = find_scenarios(paths)
        if not keyword and (count or (len(files) > 1 and not as_json)):
            scenarios = {str(file): load_scenario(file, overrides=overrides) for file in files}
            found: Listed = {name: (number_of_cases(s), ()) for name, s in scenarios.items()}
            return _show(found, (), as_json=as_json, count=True)
        found = _by_file(files, overrides, keyword, count=count)
        return _show(found, (), as_json=as_json, count=count)
    from harness.runner.plan import parts, take_shard

    suite = load_suite(paths, tiers=tiers, overrides=overrides)
    cases, selected = suite.cases("cpu", forced=True, keyword=keyword, how=how)
    if shards is not None:
        return _show_shards(parts(cases, shards), as_json=as_json)
    if shard is not None:
        cases, _ = take_shard(cases, shard)
    notes = [note for part in selected if (note := part.note())]
    return _show({suite.name: (len(cases), cases)}, notes, as_json=as_json, count=count)


def _by_file(
    files: Sequence[Path], overrides: Overrides, keyword: str | None, *, count: bool
) -> Listed:
    found: Listed = {}
    for file in files:
        if chosen := select(expand(load_scenario(file, overrides=overrides), "cpu"), keyword):
            # Ten thousands of a file take memory.
            found[str(file)] = len(chosen), () if count else chosen
    if not found:
        raise NothingSelected("no case is selected")
    return found


def _show(found: Listed, notes: Sequence[str], *, as_json: bool, count: bool) -> int:
    if as_json:
        print_json({name: number if count else [case.to_json() for case in cases]
                    for name, (number, cases) in found.items()})  # fmt: skip
        return ExitCode.PASSED
    for name, (number, cases) in found.items():
        click.echo(f"{name}: {counted(number, 'case')}")
        click.echo("".join(f"  {case.id}\n" for case in cases if not count), nl=False)
    if len(found) > 1:
        total = sum(number for number, _ in found.values())
        click.echo(f"{counted(total, 'case')} in {len(found)} scenarios")
    click.echo("".join(f"{note}\n" for note in notes), nl=False)
    return ExitCode.PASSED


def _show_shards(found: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    """A line a shard that holds cases; as JSON, `{"include": [...]}` as GitHub takes it."""
    if as_json:
        print_json({"include": found})
        return ExitCode.PASSED
    for part in found:
        click.echo(
            f"--shard {part['shard']}: {counted(part['cases'], 'case')}, "
            f"{counted(part['runs'], 'run')}, about {part['expected_slot_s']:.0f} s of one slot"
        )
    return ExitCode.PASSED


def _show_checks(*, as_json: bool) -> int:
    if as_json:
        keys = ("expected", "default", "doc")
        print_json({name: {"doc": check.doc, "always": check.always, "options": {
                        option: {key: getattr(held, key) for key in keys}
                        for option, held in check.options.items()}}
                    for name, check in CHECKS.items()})  # fmt: skip
    else:
        click.echo("\n".join(table()))
    return ExitCode.PASSED


def _check(files: Sequence[Path], overrides: Overrides, *, as_json: bool) -> int:
    checked = check_files(files, overrides)
    if as_json:
        print_json([item.to_json() for item in checked])
    for item in checked:
        if item.error:
            click.echo(item.error, err=True)
        elif not as_json:
            click.echo(f"{item.file}: {counted(item.num_cases, 'case')}")
    codes = {item.exit_code for item in checked}
    return min(codes - {ExitCode.PASSED} or codes or {ExitCode.NOTHING_RAN})


State = Literal["ok", "warn", "missing"]
Finding = tuple[str, str, State, str]
"""What cannot run where it is missing, a name, its state, and what was found."""
COLOURS: dict[State, str] = {"ok": "green", "warn": "yellow", "missing": "red"}
GIB = 1 << 30
MIN_DISK_BYTES, MIN_MEMORY_BYTES, MIN_SHM_BYTES = 1 * GIB, 2 * GIB, 64 << 20
MIN_OPEN_FILES = 1024
TESTED = {"python": ((3, 11), (3, 12)), "torch": ((2, 11), (2, 13))}
"""First and last release that is tested."""


def conclude(findings: Iterable[Finding], machine: Machine) -> tuple[list[str], list[str]]:
    """What can run, with its slots, and what cannot, with the reason."""
    can_run, cannot_run, lacks = list[str](), list[str](), list[str]()
    held = list(findings)
    for purpose, name, room in (
        ("cpu", "device: cpu", f", {default_slots(machine)} rank slots"),
        ("cuda", "device: cuda", f", {len(machine.gpus)} GPUs"),
        ("te", "backend: te", ""),
    ):
        # Each needs what those before it need.
        lacks += [f"{what}: {detail}" for needed_by, what, state, detail in held
                  if state == "missing" and needed_by == purpose]  # fmt: skip
        if lacks:
            cannot_run.append(f"{name} ({'; '.join(lacks)})")
        else:
            can_run.append(name + room)
    return can_run, cannot_run


def look(machine: Machine, out: Path) -> Iterator[Finding]:
    """Look at everything that a run needs; `out` is where run folders would go."""
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
@cli.as_json
def doctor(*, as_json: bool) -> int:
    """Say what this machine can run, and what it lacks.

    Exit codes: 0 it can run something, 6 nothing.
    """
    here = describe_machine()
    findings = list(look(here, DEFAULT_OUT))
    can_run, cannot_run = conclude(findings, here)
    code = ExitCode.PASSED if can_run else ExitCode.NO_VERDICT
    if as_json:
        names = ("purpose", "name", "state", "detail")
        found = [dict(zip(names, finding, strict=True)) for finding in findings]
        cli.print_json({"findings": found, "can_run": can_run, "cannot_run": cannot_run,
                            "machine": here.to_json()})  # fmt: skip
        return code
    console = make_console()
    rows = ((name, cell(state, COLOURS[state]), detail) for _, name, state, detail in findings)
    print_table(console, ("", "state", ""), rows)
    for line in can_run:
        print_line(console, f"can run     {line}", "green")
    for line in cannot_run:
        print_line(console, f"cannot run  {line}", "yellow")
    return code
