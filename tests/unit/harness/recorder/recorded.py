"""Runs a small training program in a forked child with the recorder in it, and reads its records.

The recorder patches torch for the whole process, so each program gets a process of its own.
"""

import atexit
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once here, not in each child
from torch import nn

from harness.recorder import session as recording
from harness.records import (
    ABSENT,
    AFTER,
    DIGEST_HEX_CHARS,
    ErrorRecord,
    RankRecords,
    StepRecord,
)
from harness.store.streams import rank_path, read_rank

Program = Callable[[], object]
PARAMS = ("0.weight", "0.bias", "1.weight", "1.bias")


def model_of() -> nn.Sequential:
    """Two layers, whose parameters are `PARAMS`."""
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def train(model: nn.Module, *optimizers: Any, steps: int = 1, microbatches: int = 1) -> None:
    """A plain loop: all optimizers step together."""
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(microbatches):
            model(torch.full((2, 3), 1.0 + step + micro / 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def step_of(model: nn.Module, x: Any = None, optimizer: Any = None, factor: float = 1.0) -> None:
    """One step, whose loss is the sum of what the model makes of `x`, times a factor."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    out = model(torch.ones(3) if x is None else x).sum() * factor
    (out.abs() if out.is_complex() else out).backward()
    optimizer.step()


def plain() -> None:
    """Two steps of Adam."""
    model = model_of()
    train(model, torch.optim.Adam(model.parameters()), steps=2)


def record_folder(
    folder: Path,
    /, *, keep: dict[str, Any] | None = None, taps: tuple[str, ...] = (),
                  rounding: int = 0, sketch: str = "none",
                  operators: dict[str, Any] | None = None, **program: Any) -> Path:  # fmt: skip
    """A run's folder with its specification, as far as the recorder reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"program": program, "steps": 2, "taps": list(taps)}
    spec = {"config": config, "keep": keep, "rounding": rounding, "sketch": sketch}
    (folder / "spec.json").write_text(json.dumps(spec | {"operators": operators}))
    return folder


def recorded(program: Program, folder: Path, *, code: int = 0, seed: int = 0,
             run: str = "run", **about: Any) -> RankRecords:  # fmt: skip
    """Records of `program`, the only rank of a run, whose process must end with `code`."""
    record_folder(folder, **about)

    def observed() -> None:
        session = recording.begin()
        assert session is not None
        try:
            program()
        except BaseException as error:
            session.fail(error)
            raise
        session.end()

    run_in_child(observed, folder, code=code, seed=seed, variables={
        "RANK": "0", "WORLD_SIZE": "1", "DELTAZERO_RECORD": str(folder), "DELTAZERO_RUN": run,
    })  # fmt: skip
    return read_rank(rank_path(folder, 0), 0)


def run_in_child(
    program: Program, folder: Path, *, variables: dict[str, str], code: int = 0, seed: int = 0
) -> None:
    """Run `program` in a process of its own, which must end with `code`."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(program, folder, seed, variables)
    _, status = os.waitpid(pid, 0)
    ended = os.waitstatus_to_exitcode(status)
    assert ended == code, (folder / "stderr").read_text()


def pair(program: Callable[[Any], object], folder: Path, *values: Any, **about: Any) -> list[Any]:
    """Records of a program with each of several values."""
    return [
        recorded(lambda value=value: program(value), folder / str(place), **about)  # type: ignore[misc]
        for place, value in enumerate(values)
    ]


def error_of(program: Program, folder: Path, *, code: int = 1, **about: Any) -> ErrorRecord:
    """The error of a program that has one, and therefore no end."""
    records = recorded(program, folder, code=code, **about)
    assert records.error is not None
    assert records.end is None
    return records.error


def _child(program: Program, folder: Path, seed: int, variables: dict[str, str]) -> None:
    code = 1
    sys.stderr = (folder / "stderr").open("w", buffering=1)
    try:
        torch.set_num_threads(1)  # the threads of the parent's pool are not in this process
        gc.freeze()  # nor those of process groups, which garbage of the parent would wait for
        atexit._clear()  # what the parent has to do at its end
        os.environ |= variables
        torch.manual_seed(seed)
        program()
        atexit._run_exitfuncs()
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter's own last frame
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def names(records: RankRecords, group: str) -> tuple[str, ...]:
    """Names of a group's tensors over all steps."""
    assert records.start is not None
    return records.start.tensors[group]


def digests(records: RankRecords, group: str, step: int) -> dict[str, str]:
    """Digests of what a group holds in a step, -1 is before the first, by name."""
    record = records.initial if step < 0 else records.steps[step]
    assert record is not None
    text = record.digests[group]
    chunks = [text[i : i + DIGEST_HEX_CHARS] for i in range(0, len(text), DIGEST_HEX_CHARS)]
    found = dict(zip(names(records, group), chunks, strict=True))
    return {name: digest for name, digest in found.items() if digest != ABSENT}


def changed(first: RankRecords, second: RankRecords, step: int) -> set[str]:
    """What two runs hold with other digests in a step as it ended, as `group:name`."""
    record = first.initial if step < 0 else first.steps[step]
    assert record is not None
    return {
        f"{group}:{name}"
        for group in record.digests
        if not group.endswith(AFTER)
        for name in digests(first, group, step).keys() | digests(second, group, step).keys()
        if digests(first, group, step).get(name) != digests(second, group, step).get(name)
    }


def all_digests(records: RankRecords) -> list[dict[str, str]]:
    """Everything that is compared bit for bit, step by step, the initial state first."""
    assert records.initial is not None
    return [dict(records.initial.digests), *(dict(step.digests) for step in records.steps)]


def losses(step: StepRecord) -> list[float | None]:
    """Microbatch losses of a step."""
    return [loss.value for loss in step.microbatch_losses]


def taps(records: RankRecords, step: int) -> dict[str, str]:
    """Digests of the rows of taps of a step, by name; without rows that it does not have."""
    assert records.start is not None
    text, width = records.steps[step].taps, DIGEST_HEX_CHARS + 8
    rows = [text[i : i + width] for i in range(0, len(text), width)]
    found = zip(records.start.taps, rows, strict=True)
    return {name: row[:DIGEST_HEX_CHARS] for name, row in found if set(row) != {"f"}}
