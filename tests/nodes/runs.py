"""Runs for a Slurm: ranks that misbehave, an engine in a hurry, waiting for files."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.engine.ranks import Limits
from harness.engine.slurm import Patience, SlurmEngine, SlurmOptions
from harness.records import RunOutcome, RunSpec
from tests.nodes.local_slurm import LocalSlurm

ENTRY = "tests.planted.stub_ranks:rank_main"
LIMITS = Limits(grace_s=0.5, stacks_s=0.5)
TWO_BY_TWO = SlurmOptions(nodes=2)
LIMIT_S = 600.0
"""How long to wait for what must happen, and what runs may take; reached only by a failing test,
however busy the machine."""
PATIENCE = Patience(poll_s=0.05, late_s=3.0, cancel_s=LIMIT_S)


def spec(
    stub: dict[str, str] | None = None,
    world_size: int = 4,
    timeout_s: float = LIMIT_S,
    name: str = "",
    **more: Any,
) -> RunSpec:
    config = {"graph": [], "steps": 4, "microbatches": 1, "stub": stub or {}, "name": name}
    plain = {"config": config, "device": "cpu", "world_size": world_size, "timeout_s": timeout_s}
    return RunSpec.from_json(plain | more)


@contextmanager
def allocation(slurm: LocalSlurm, *more: str, nodes: int = 2) -> Iterator[str]:
    """A job of two CPUs a node, which engines that are made inside find around them; its id."""
    command = ("salloc", "--no-shell", f"--nodes={nodes}", "--cpus-per-task=2", *more)
    said = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    granted = re.search(r"Granted job allocation (\d+)", said.stderr)
    assert granted is not None, said.stderr
    variables = {"SLURM_JOB_ID": granted[1], "SLURM_JOB_NUM_NODES": str(nodes)}
    os.environ.update(variables)
    try:
        yield granted[1]
    finally:
        for name in variables:
            del os.environ[name]
        slurm.call("scancel", granted[1], check=False)


def engine(options: SlurmOptions = TWO_BY_TWO, patience: Patience = PATIENCE) -> SlurmEngine:
    return SlurmEngine(options, entry=ENTRY, limits=LIMITS, patience=patience)


def finish(
    engine: SlurmEngine,
    run: RunSpec,
    folder: Path,
    sign: str = "",
    act: Callable[[], object] = lambda: None,
) -> RunOutcome:
    """The outcome of a run, to which `act` is done once each rank has given the sign."""
    engine.start(run, folder)
    if sign:
        wait_for(*(folder / f"{sign}{rank}" for rank in range(run.world_size)))
        act()
    (outcome,) = engine.wait(LIMIT_S)
    return outcome


def wait_for(*paths: Path) -> None:
    until(lambda: all(path.exists() for path in paths), paths)


def until(done: Callable[[], object], otherwise: object) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)
