"""A job that records itself: what is written without a harness, and what never ends the job."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from harness.recorder import Recorder, observer, record
from harness.recorder import ring as rings
from harness.runner.recorded import compare
from harness.store.streams import Part, read_parts
from tests.support.fake_engine import Patch
from tests.unit.harness.recorder.recorded import (
    PARAMS,
    digests,
    model_of,
    names,
    recorded,
    run_in_child,
    taps,
)


def job(
    folder: Path, *, steps: int = 6, plant: int = -1, bad: Callable[[int], object] = lambda _: None,
    **settings: Any,
) -> None:  # fmt: skip
    """Trains AdamW on data that the step decides, from `first_step` on, and records itself."""
    torch.manual_seed(0)
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=0.1)
    first = settings.get("first_step", 0)
    for step in range(steps):
        if step == first:
            # What is not named is found.
            named = (model, optimizer) if first else ()
            record(*named, folder=folder, **settings)
        bad(step)
        x = torch.full((2, 3), 1.0 + step)
        model(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == plant:
            with torch.no_grad():
                model.get_parameter("1.weight")[0, 2] *= 1 + 2**-22
        optimizer.step()
        optimizer.zero_grad()


def recorded_job(folder: Path, *, code: int = 0, rank: int = 0, **settings: Any) -> Part:
    """The last part of a job that ran in a process of its own."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2"}
    run_in_child(lambda: job(folder, **settings), folder, code=code, variables=variables)
    return read_parts(folder, rank)[-1]


def test_a_job_is_recorded_by_its_own_line(tmp_path: Path) -> None:
    """Losses, norm and seconds of all steps; state and taps of some; before the first; the end."""
    part = recorded_job(tmp_path, every=2, taps="0")
    held = part.records
    assert held.problems == ()
    assert held.start is not None
    assert (held.start.world_size, held.start.rank) == (2, 0)
    fingerprint = held.start.environment["fingerprint"]
    assert fingerprint["torch"] == torch.__version__
    assert fingerprint["packages"]["click"]
    assert [step.step for step in held.steps] == list(range(6))
    assert all(step.loss and step.grad_norm and step.step_s >= 0 for step in held.steps)
    for step in range(6):
        due = step % 2 == 0
        assert set(digests(held, "weights", step)) == (set(PARAMS) if due else set())
        assert set(digests(held, "grads", step)) == (set(PARAMS) if due else set())
        assert set(taps(held, step)) == ({"0:output[0]"} if due else set())
    assert set(digests(held, "weights", -1)) == set(PARAMS)
    assert "0.weight.exp_avg" in names(held, "optim")
    assert part.shapes["grads"]["0.weight"] == "float32[3, 3]"
    assert held.end is not None


def test_losses_only_and_later_parts(tmp_path: Path) -> None:
    """`every=0` digests nothing but the state before; a part has the numbers of its steps."""
    recorded_job(tmp_path / "a", every=1)
    recorded_job(tmp_path / "b", every=0)
    done = compare(tmp_path / "a", tmp_path / "b")
    assert (done.exit_code, done.a["only"], done.compared["step"]) == (0, {"digested step": 6}, 6)
    recorded_job(tmp_path / "c", every=1, steps=4)
    part = recorded_job(tmp_path / "c", every=1, first_step=3)
    assert [step.step for step in part.records.steps] == [3, 4, 5]
    done = compare(tmp_path / "a", tmp_path / "c")
    assert (done.exit_code, done.compared["step"], done.b["parts"]) == (0, 6, 2)


def test_one_changed_bit_of_a_job_is_found(tmp_path: Path) -> None:
    """The step, the rank and the tensor, by `harness diff`; equal jobs are equal."""
    for rank in (0, 1):
        for name in ("a", "b", "c"):
            plant = 3 if (rank, name) == (1, "c") else -1
            recorded_job(tmp_path / name, rank=rank, every=1, plant=plant)
    assert compare(tmp_path / "a", tmp_path / "b").exit_code == 0
    first = compare(tmp_path / "a", tmp_path / "c").findings[0].difference
    assert (first.step, first.rank, first.quantity, first.tensor) == (3, 1, "weights", "1.weight")


def full(step: int) -> None:
    """From the record of step 2 on nothing fits on the disk, but for a word about it."""
    write = os.write

    def refuses(file: int, data: bytes) -> int:
        if b'"kind":"step"' in data and b'"step":0' not in data and b'"step":1' not in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    if step == 0:
        rings.os.write = refuses  # type: ignore[attr-defined]


def broken(step: int) -> None:
    """From step 3 on the recorder itself fails."""

    def fails(*_: Any) -> None:
        raise KeyError("lost")

    if step == 3:
        vars(observer)["optimizer_state"] = fails


@pytest.mark.parametrize("bad", [full, broken])
def test_what_goes_wrong_ends_the_recording_and_not_the_job(
    bad: Callable[[int], object], tmp_path: Path
) -> None:
    """A full disk, a mistake of the recorder: the job goes on to its end, and both say it."""
    part = recorded_job(tmp_path, every=1, bad=bad)
    assert part.records.error is not None
    assert part.records.problems == ()
    assert [step.step for step in part.records.steps] == [0, 1, 2][: 3 if bad is broken else 2]
    assert "recorder" in (tmp_path / "stderr").read_text()


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path) -> None:
    """The job trains on; wrong settings are a mistake of its author and end it."""
    (tmp_path / "file").touch()

    def program() -> None:
        model = model_of()
        assert type(record(model, folder=tmp_path / "file")) is Recorder
        assert type(record(model, folder=tmp_path / "file")) is Recorder

    run_in_child(program, tmp_path, variables={})
    assert (tmp_path / "stderr").read_text().count("recorder:") == 1
    for wrong in ({"every": -1}, {"every": 1.5}, {"ring": "1 parsec"}, {"first_step": None}):
        with pytest.raises(ValueError, match="expected"):
            record(folder=tmp_path, **wrong)


def test_a_disk_that_hangs_costs_no_step(tmp_path: Path, monkeypatch: Patch) -> None:
    """Writing is another thread's; what it cannot keep up with ends the recording."""
    stopped: list[str] = []
    monkeypatch.setattr(rings, "MOST_BEHIND_BYTES", 1 << 16)
    monkeypatch.setattr(rings, "CLOSING_S", 0.0)
    ring = rings.Ring(tmp_path / "rank0", 1 << 20, stopped.append)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    ring._fd = os.open(tmp_path / "pipe", os.O_WRONLY)  # full after 64 KiB
    for _ in range(100):
        ring.write({"kind": "event", "rank": 0, "x": "x" * 4096})
    ring.close()
    assert len(stopped) == 1
    os.close(reader)


def test_the_harness_has_settings_of_its_own(tmp_path: Path) -> None:
    """Under it the folder of the script is not used."""
    held = recorded(lambda: job(tmp_path / "own", every=3, steps=4), tmp_path / "run", every=1)
    assert not (tmp_path / "own").exists()
    assert all(step.digests["weights"].strip("f") for step in held.steps)
