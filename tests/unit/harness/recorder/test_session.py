"""How a recorded process begins and ends: imports, exit codes, errors and what they mean."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from harness.recorder import UNRECORDED, record
from harness.recorder import session as recording
from harness.recorder.observer import Observer
from harness.recorder.session import TABLE, failures_of
from harness.store.streams import rank_path, read_rank
from tests.support.fake_engine import Patch
from tests.unit.harness.recorder.recorded import (
    error_of,
    model_of,
    plain,
    record_folder,
    recorded,
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
    """Train with the file of records on a disk without space."""
    links = (each for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    (fd,) = (int(each.name) for each in links if each.readlink().name == "rank0.jsonl")
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
    own = {f"harness.recorder{name}" for name in ("", ".ring", ".session")}
    assert set(light) == facts | own
    parts = ["capture", "collectives", "graphs", "hooks", "observer", "ring", "rows", "session",
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
