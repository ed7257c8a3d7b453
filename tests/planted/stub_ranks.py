"""Ranks without torch: they write valid records, then behave as `spec.config["stub"]` says.

`spec.config["stub"]` maps a rank ("2") or every rank ("*") to one of `BEHAVIOURS`, `_last` after it
for once every rank has begun. A rank that must not go on before another has acted waits for a file
or for its own end, never for a time.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness.checks.complete import OF_INITIAL
from harness.records import InitialRecord, Record, RunSpec, StartRecord, StepRecord, What, dumps
from tests.support import records

TENSORS: dict[str, tuple[str, ...]] = {
    "samples": ("tokens",), "grads": ("a",), "weights": ("a",), "optim": ("a.m",), "rng": ("cpu",),
}  # fmt: skip
SHOWN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTHONHASHSEED",
)  # fmt: skip


class Stream:
    """A rank's record file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = (folder / f"rank{rank}.jsonl").open("w", buffering=1)

    def write(self, record: Record) -> None:
        self.file.write(dumps(record) + "\n")


class Stub(NamedTuple):
    """What a behaviour knows."""

    spec: RunSpec
    folder: Path
    rank: int
    stream: Stream

    def touch(self, name: str) -> None:
        (self.folder / f"{name}{self.rank}").touch()

    def await_go(self, sign: str) -> None:
        """Go on when the test says so."""
        self.touch(sign)
        while not (self.folder / "go").exists():
            time.sleep(0.005)


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    stream = Stream(folder, rank)
    stream.write(start_record(spec, rank))
    stream.write(initial_record(rank))
    behaviours = spec.config.get("stub", {})
    name = behaviours.get(str(rank), behaviours.get("*", "ok"))
    steps = spec.config["steps"]
    for step in range(steps):
        if step == steps // 2 and name != "ok":
            if name.endswith("_last"):
                for other in range(spec.world_size):
                    pid_of_rank(folder, other)
            act = BEHAVIOURS[name.removesuffix("_last")]
            if (code := act(Stub(spec, folder, rank, stream))) is not None:
                return code
        stream.write(step_record(step, rank))
    stream.write(records.end(rank, steps=steps))
    return 0


def start_record(spec: RunSpec, rank: int) -> StartRecord:
    shown = {name: os.environ.get(name, "") for name in SHOWN_VARIABLES}
    environment = {"pid": os.getpid(), "env": shown, "unix_s": time.time(), "fingerprint": {}}
    return records.start(
        rank, world_size=spec.world_size, pid=os.getpid(), tensors=TENSORS, environment=environment
    )


def initial_record(rank: int) -> InitialRecord:
    return InitialRecord(rank=rank, digests=dict.fromkeys(OF_INITIAL, "0" * 32), nonfinite={})


def step_record(step: int, rank: int) -> StepRecord:
    return records.step(step, rank, digests=dict.fromkeys(TENSORS, f"{rank:032x}"))


def sleep_for_ever(sign: Path | None = None) -> int:
    if sign is not None:
        sign.touch()  # from here: whoever sees it sees this function in the rank's stack, too
    while True:
        time.sleep(3600)


def pid_of_rank(folder: Path, rank: int) -> int:
    """Process id in the start record of a rank, once that is there."""
    while True:
        path = folder / f"rank{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        if "\n" in text:
            return int(StartRecord.from_json(json.loads(text.split("\n")[0])).pid)
        time.sleep(0.002)


def _stat(pid: int) -> list[str]:
    """Of a process: state, parent, ...; a dead one's if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


Behaviour = Callable[[Stub], int | None]
"""What a rank does in the middle of its steps; the code that it exits with, None to go on."""


def _kill(number: int) -> int | None:
    os.kill(os.getpid(), number)
    return None


def hang(stub: Stub) -> int:
    return sleep_for_ever(stub.folder / f"hanging{stub.rank}")


def _ignore_term(stub: Stub) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return hang(stub)


def _raise(stub: Stub) -> int:
    raise ZeroDivisionError("planted")


def _error(what: What, kind: str, message: str, code: int = 1) -> Behaviour:
    def act(stub: Stub) -> int:
        stub.stream.write(records.error(stub.rank, what=what, type=kind, message=message))
        return code

    return act


def _peer_lost(stub: Stub) -> int | None:
    """Wait for rank 0 to be gone, then report what gloo would."""
    while _stat(pid_of_rank(stub.folder, 0))[0] not in ("Z", "X"):
        time.sleep(0.005)
    return _error("crashed", "RuntimeError", "Connection closed by peer [127.0.0.1]:4242")(stub)


def _flood(stub: Stub) -> None:
    for _ in range(20_000):
        os.write(2, b"x" * 99 + b"\n")
    os.write(2, b"the last words\n")


def _print(stub: Stub) -> None:
    sys.stdout.write("to stdout\n")
    sys.stderr.write("to stderr\n")


def _orphan_helper(stub: Stub) -> int | None:
    """Start a helper the way daemons do, wait for `go`, and fail if the helper is gone by then."""
    file = stub.folder / f"helper{stub.rank}"
    subprocess.run([sys.executable, "-c", DAEMON, str(file)], check=True)
    stub.await_go("helped")
    return None if _stat(int(file.read_text()))[0] not in ("Z", "X") else 5


DAEMON = """
import os, sys, time
pid = os.fork()
if pid == 0:
    time.sleep(3600)
open(sys.argv[1], "w").write(str(pid))
"""


def _children(then: Behaviour) -> Behaviour:
    """Leave two children behind, one of them in a session of its own."""

    def act(stub: Stub) -> int | None:
        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        pids = [subprocess.Popen(command, start_new_session=own).pid for own in (False, True)]
        (stub.folder / f"children{stub.rank}").write_text(f"{pids[0]} {pids[1]}")
        return then(stub)

    return act


def _tidies(then: Behaviour) -> Behaviour:
    """With a child that takes a moment, once the rank is gone, to do what has to be done then."""

    def act(stub: Stub) -> int | None:
        read_fd, write_fd = os.pipe()
        if os.fork() == 0:
            os.close(write_fd)
            os.read(read_fd, 1)
            time.sleep(0.2)
            stub.touch("tidied")
            os._exit(0)
        return then(stub)

    return act


def _kill_leader(stub: Stub) -> int:
    os.kill(os.getppid(), signal.SIGKILL)
    return sleep_for_ever()


def _half_line(stub: Stub) -> None:
    stub.stream.file.write(dumps(step_record(1, stub.rank))[:40])
    stub.stream.file.flush()
    _kill(signal.SIGKILL)


def _illegal_access(stub: Stub) -> None:
    sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
    os.abort()


BEHAVIOURS: dict[str, Behaviour] = {
    "sigkill": lambda stub: _kill(signal.SIGKILL),
    "segv": lambda stub: _kill(signal.SIGSEGV),
    "exit13": lambda stub: 13,
    "exit256": lambda stub: 256,
    "exit_text": lambda stub: sys.exit("last words"),
    "leave_early": lambda stub: 0,
    "hang": hang,
    # Unless an earlier attempt was set aside.
    "hang_once": lambda stub: (
        None if stub.folder.with_name(f"{stub.folder.name}.attempt0").exists() else hang(stub)
    ),
    "await_go": lambda stub: stub.await_go("waiting"),
    "ignore_term": _ignore_term,
    "raise": _raise,
    "oom": _error("oom", "OutOfMemoryError", "CUDA out of memory. Tried to allocate"),
    "error_exit0": _error("crashed", "E", "odd", code=0),
    "peer_lost": _peer_lost,
    "kill_leader": _kill_leader,
    "flood": _flood,
    "print": _print,
    "print_then_die": lambda stub: (sys.stdout.write("last words\n"), _kill(signal.SIGKILL))[1],
    "orphan_helper": _orphan_helper,
    "children": _children(lambda stub: None),
    "children_then_hang": _children(hang),
    "children_then_die": _children(lambda stub: _kill(signal.SIGKILL)),
    "children_then_kill_leader": _children(_kill_leader),
    "tidies": _tidies(lambda stub: None),
    "tidies_then_dies": _tidies(lambda stub: _kill(signal.SIGKILL)),
    "tidies_then_hangs": _tidies(hang),
    "half_line": _half_line,
    "illegal_access": _illegal_access,
    "stop_self": lambda stub: (stub.touch("hanging"), _kill(signal.SIGSTOP))[1],
}
