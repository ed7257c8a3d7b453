"""How a recorded process begins and ends: imports, exit codes, errors and what they mean."""

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from harness import recorder
from harness.recorder import UNRECORDED, Recorder, observer, record
from harness.recorder import session as recording
from harness.recorder.observer import Observer
from harness.recorder.session import TABLE, failures_of
from harness.runner.recorded import compare
from harness.store.streams import Part, rank_path, read_parts, read_rank
from tests.support.fake_engine import Patch
from tests.unit.harness.recorder.recorded import (
    PARAMS,
    digests,
    error_of,
    model_of,
    names,
    plain,
    record_folder,
    recorded,
    run_in_child,
    taps,
    train,
)


class Lost(nn.Module):
    """Fails in its second call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise KeyError("lost")
        return x


class Refuses(SGD):
    """Fails in its second step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = self.__dict__["number"] = self.__dict__.get("number", 0) + 1
        if number == 2:
            raise KeyError("lost")
        super().step()


def failing(where: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Lost()))
    model = model if where == "module" else model_of()
    optimizer = (Refuses if where == "optimizer" else SGD)(model.parameters(), 0.1)
    if where == "before":
        raise KeyError("lost")
    if where == "backward":
        calls = iter(range(2))

        def once(gradient: Tensor) -> None:
            if next(calls):
                raise KeyError("lost")

        next(model.parameters()).register_hook(once)
    if where == "forward":
        model(torch.ones(2, 7))
    if where == "lines":
        recorder = record(model, optimizer)
        for index in range(2):
            with recorder.step():
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                if index == 1:
                    raise KeyError("lost")
    train(model, optimizer, steps=2)
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("where", "step", "module", "phase"),
    [
        ("before", -1, "", ""), ("forward", 0, "0", "forward"), ("optimizer", 1, "", "optimizer"),
        ("lines", 1, "", ""), ("after", 1, "", ""), ("module", 1, "1.0", "forward"),
        ("backward", 1, "", "backward"),
    ],
)  # fmt: skip
def test_an_error_is_of_the_step_and_module_at_work(
    where: str, step: int, module: str, phase: str, tmp_path: Path
) -> None:
    """Before the first forward pass there is none; after the last step that is due it is that."""
    found = error_of(lambda: failing(where), tmp_path)
    assert (found.step, found.module, found.what) == (step, module, "crashed")
    assert found.phase == phase
    assert found.type == ("RuntimeError" if where == "forward" else "KeyError")
    assert found.message in found.traceback


class Capture:
    """Its end fails where what was inside did, as that of a CUDA graph's capture does."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            raise RuntimeError("failed due to a previous error")


def test_an_error_is_the_first_one_and_not_that_of_the_cleaning_up(tmp_path: Path) -> None:
    """What a program raises while it handles another error is its own word."""

    def in_capture() -> None:
        with Capture():
            model_of()(torch.ones(2, 7))

    def handled() -> None:
        try:
            in_capture()
        except RuntimeError:
            raise KeyError("refused")  # noqa: B904 - as a program might

    found = error_of(in_capture, tmp_path / "in")
    assert "mat1 and mat2" in found.message
    assert found.raised_at.split() == [ANY, "in_capture"]
    assert "failed due to a previous error" in found.traceback
    assert error_of(handled, tmp_path / "handled").type == "KeyError"


def test_an_error_is_at_the_line_of_the_program_and_not_of_what_it_called(tmp_path: Path) -> None:
    """A file of Python's library, or one that torch generated, is not the program's."""

    def samples() -> None:
        random.sample([1], 2)

    def generated() -> None:
        torch.fx.symbolic_trace(model_of())(torch.ones(2, 7))

    for program in (samples, generated):
        found = error_of(program, tmp_path / program.__name__)
        assert found.raised_at.split() == [ANY, program.__name__]


class Strange(Exception):
    """Has any attribute, and no words."""

    def __getattr__(self, name: str) -> None:
        return None

    def __str__(self) -> str:
        raise ValueError("no words")


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_leaves_at_once_is_recorded_to_its_end(code: int, tmp_path: Path) -> None:
    """`os._exit(0)` loses no step; with another code it is no end."""

    def program() -> None:
        plain()
        os._exit(code)

    records = recorded(program, tmp_path, code=code)
    assert (records.end is not None, len(records.steps)) == (code == 0, 2 if code == 0 else 1)


RAISES = """
import os, sys
os.environ["DELTAZERO_RECORD"] = "."
from harness.recorder.session import begin
begin()
sys.excepthook = lambda *error: None
raise KeyError("lost")
"""


def test_an_error_is_recorded_whoever_prints_it(tmp_path: Path) -> None:
    """Of a program with a hook for exceptions of its own."""
    record_folder(tmp_path)
    run(RAISES, tmp_path, code=1)
    error = read_rank(rank_path(tmp_path, 0), 0).error
    assert error is not None
    assert error.type == "KeyError"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "illegal_access"),
        (ValueError("no"), "crashed"),
        (Strange("no"), "crashed"),
    ],
)
def test_what_an_error_means(error: Exception, what: str, tmp_path: Path) -> None:
    """By its type, or by CUDA's own words."""
    found = error_of(lambda: raising(error), tmp_path)
    assert (found.what, found.type) == (what, type(error).__name__)


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """What a child trains is not in its parent's records, and its end is not the parent's."""

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        train(model, optimizer)
        pid = os.fork()
        if pid == 0:
            train(model, optimizer, steps=3)
            # The same rank has a process that records.
            os._exit(5 if recording.begin() is None else 6)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 5
        train(model, optimizer)

    records = recorded(program, tmp_path)
    assert [step.step for step in records.steps] == [0, 1]
    assert not records.problems


class Broken(dict[str, Tensor]):
    """A group of state that cannot be read."""

    def items(self) -> Any:
        """No tensors."""
        raise RuntimeError("no such state")


@pytest.mark.parametrize("where", ["at the end", "in a step", "in lines"])
def test_a_recorder_that_fails_gives_no_whole_run(
    where: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The program goes on and ends well; its records have the error, and no end."""
    if where == "at the end":
        monkeypatch.setattr(Observer, "finish", lambda _: Broken().items())

    def program() -> None:
        model = model_of()
        optimizer = SGD(model.parameters(), 0.1)
        if where != "at the end":
            record().state("own", Broken())
        if where == "in lines":
            with record().step():
                train(model, optimizer)
        train(model, optimizer, steps=2)

    error = error_of(program, tmp_path, code=0)
    assert (error.what, error.type) == ("unsupported", "RuntimeError")


def on_a_full_disk() -> None:
    """Train with the file of records on a disk without space, and with nothing to print to."""
    sys.stderr = None
    links = (each for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    own = rank_path(Path(os.environ["DELTAZERO_RECORD"]).resolve(), 0)  # other tests may leak some
    (fd,) = (int(each.name) for each in links if each.readlink() == own)
    os.dup2(os.open("/dev/full", os.O_WRONLY), fd)
    plain()


def test_whose_a_full_disk_is(tmp_path: Path) -> None:
    """Records without space end with an exit code of their own; a program's own is its failure."""
    records = recorded(on_a_full_disk, tmp_path / "ours", code=UNRECORDED)
    assert (records.error, records.end) == (None, None)
    own = error_of(lambda: Path("/dev/full").write_text("a checkpoint"), tmp_path / "own")
    assert (own.what, own.type) == ("crashed", "OSError")


IMPORTS = """
import sys
before = set(sys.modules)
import harness.recorder.session
assert "torch" not in sys.modules
print(*sorted(m for m in set(sys.modules) - before if m.split(".")[0] == "harness"))
names = sorted(m.split(".")[0] for m in set(sys.modules) - before)
foreign = set(names) - sys.stdlib_module_names - {"harness"}
assert not foreign, foreign
import harness.recorder.hooks
print(*sorted(m for m in sys.modules if m.split(".")[0] in ("harness", "fsdp_core")))
"""
OUTSIDE = """
import sys
from harness.recorder import record
recorder = record(object(), object(), taps="*")
for _ in range(2):
    with recorder.step():
        recorder.microbatch(1); recorder.grad_norm(1.0); recorder.skipped("x")
    recorder.state("ema", {})
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def run(text: str, folder: Path, *, code: int = 0) -> list[str]:
    """Lines that an interpreter outside of the harness prints, which ends with that exit code."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DELTAZERO")}
    environ |= {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environ, cwd=folder, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def test_recording_needs_only_its_own_files(tmp_path: Path) -> None:
    """A program's environment needs none of the harness' dependencies, but torch."""
    light, whole = (line.split() for line in run(IMPORTS, tmp_path))
    facts = {"harness", "harness.provenance", "harness.masking"}
    own = {f"harness.recorder{name}" for name in ("", ".session")}
    assert set(light) == facts | own
    parts = ["capture", "collectives", "graphs", "hooks", "observer", "session",
             "state"]  # fmt: skip
    expected = facts | {
        "harness.recorder",
        "fsdp_core",
        "fsdp_core.dispatch",
        "fsdp_core.graph",
        "fsdp_core.graph.digest",
        "fsdp_core.graph.digest_torch",
    }
    expected |= {f"harness.recorder.{part}" for part in parts}
    assert set(whole) == expected


def test_outside_of_the_harness_the_lines_do_nothing(tmp_path: Path) -> None:
    """Without the harness' variables a script's lines write nothing and import nothing."""
    run(OUTSIDE, tmp_path)
    assert not list(tmp_path.iterdir())


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] "
MET = {
    "peer_lost": ("RuntimeError", GLOO + "Connection closed by peer [127.0.0.1]:1"),
    "mismatched": ("RuntimeError", "Received data size doesn't match expected size"),
    "illegal_access": ("AcceleratorError", "CUDA error: an illegal memory access was encountered"),
    "out_of_memory": ("OutOfMemoryError", "Tried to allocate 2 GiB"),
    "no_host_memory": ("RuntimeError", "DefaultCPUAllocator: can't allocate memory"),
    "no_group": ("RuntimeError", "Could not resolve the process group registered under the name 0"),
    "port_in_use": ("DistNetworkError", "EADDRINUSE, address already in use"),
    "rendezvous_timeout": ("DistStoreError", "Timed out after 61 seconds: 1/2 clients joined."),
    "nccl_system_error": ("DistBackendError", "NCCL error: unhandled system error"),
    "device_unavailable": (
        "AcceleratorError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    ),
    "memory_error": ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered"),
    "of_device": ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
}  # fmt: skip
OTHERS = [
    ("RendezvousTimeoutError", "", "rendezvous_timeout"),
    ("MemoryError", "", "out_of_memory"),
    ("ValueError", "Group <x> is not registered, please create group with torch", "no_group"),
    ("RuntimeError", GLOO + "bind: Address already in use", "port_in_use"),
    ("", "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal_access"),
]


def test_an_entry_is_met_by_what_its_library_raises() -> None:
    """By type, by the words of that type, or by what a dying process printed; each has a test."""
    assert TABLE.keys() == MET.keys()
    for kind, message, name in [(*met, name) for name, met in MET.items()] + OTHERS:
        assert name in failures_of(kind, message), name
    assert failures_of("ValueError", "expected 3 layers, got 2") == frozenset()
    for name in (name for name, (source, *_) in TABLE.items() if source != "any"):
        words = MET[name][1]
        assert name not in failures_of("ValueError", words)
        assert name not in failures_of("RuntimeError", f"as they say: {words}")


# --- a job that records itself: what is written without a harness, and what never ends the job ----


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
        recorder.os.write = refuses  # type: ignore[attr-defined]


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
    monkeypatch.setattr(recorder, "MOST_BEHIND_BYTES", 1 << 16)
    monkeypatch.setattr(recorder, "CLOSING_S", 0.0)
    ring = recorder.Ring(tmp_path / "rank0", 1 << 20, stopped.append)
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
