"""Ranks without torch: they write valid records, then behave as `spec.config["stub"]` says.

`spec.config["stub"]` maps a rank ("2") or every rank ("*") to one of `BEHAVIOURS`. A rank that must
not go on before another has acted waits for a file or for its own end, never for a time.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.checks.complete import OF_INITIAL
from harness.records import (
    SCHEMA_VERSION,
    EndRecord,
    ErrorRecord,
    FloatBits,
    InitialRecord,
    Record,
    RunSpec,
    StartRecord,
    StepRecord,
    dumps,
)

TENSORS: dict[str, tuple[str, ...]] = {
    "samples": ("tokens",),
    "grads": ("a",),
    "weights": ("a",),
    "optim": ("a.m",),
    "rng": ("cpu",),
}


class Stream:
    """A rank's record file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = (folder / f"rank{rank}.jsonl").open("w", buffering=1)

    def write(self, record: Record) -> None:
        self.file.write(dumps(record) + "\n")


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    stream = Stream(folder, rank)
    stream.write(start_record(spec, rank))
    stream.write(initial_record(rank))
    behaviours = spec.config.get("stub", {})
    name = behaviours.get(str(rank), behaviours.get("*", "ok"))
    steps = spec.config["steps"]
    for step in range(steps):
        if step == steps // 2 and name in BEHAVIOURS:
            code = BEHAVIOURS[name](spec, folder, rank, stream)
            if code is not None:
                return code
        stream.write(step_record(step, rank))
    stream.write(EndRecord(rank=rank, steps=steps, peak_bytes=1, startup_s=0.0, wall_s=0.0))
    return 0


def start_record(spec: RunSpec, rank: int) -> StartRecord:
    environment = {"pid": os.getpid(), "env": {k: os.environ.get(k, "") for k in SHOWN_VARIABLES}}
    return StartRecord(
        schema=SCHEMA_VERSION,
        rank=rank,
        world_size=spec.world_size,
        pid=os.getpid(),
        device="cpu",
        tensors=TENSORS,
        environment=environment | {"unix_s": time.time(), "fingerprint": {}},
    )


def initial_record(rank: int) -> InitialRecord:
    return InitialRecord(rank=rank, digests=dict.fromkeys(OF_INITIAL, "0" * 32), nonfinite={})


SHOWN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTHONHASHSEED",
)  # fmt: skip


def step_record(step: int, rank: int) -> StepRecord:
    one = FloatBits(bits="3f800000", value=1.0)
    return StepRecord(
        step=step,
        rank=rank,
        loss=one,
        microbatch_losses=(one,),
        grad_norm=one,
        digests=dict.fromkeys(TENSORS, f"{rank:032x}"),
        nonfinite={},
        step_s=0.0,
        live_bytes=1,
        peak_bytes=1,
    )


Behaviour = Callable[[RunSpec, Path, int, Stream], int | None]


def _signal(number: int) -> Behaviour:
    def act(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int | None:
        os.kill(os.getpid(), number)
        return None

    return act


def _signal_of(pid: Callable[[], int]) -> Behaviour:
    def act(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int | None:
        os.kill(pid(), signal.SIGKILL)
        return sleep_for_ever()

    return act


def grandparent() -> int:
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def sleep_for_ever(sign: Path | None = None) -> int:
    if sign is not None:
        sign.touch()  # from here: whoever sees it sees this function in the rank's stack, too
    while True:
        time.sleep(3600)


def _exit(code: int) -> Behaviour:
    return lambda spec, folder, rank, stream: code


def hang(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int:
    return sleep_for_ever(folder / f"hanging{rank}")


def await_go(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    """Go on when the test says so."""
    (folder / f"waiting{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)


def hang_once(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int | None:
    """Hang unless an earlier attempt was set aside."""
    if folder.with_name(f"{folder.name}.attempt0").exists():
        return None
    return hang(spec, folder, rank, stream)


def ignore_term(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return hang(spec, folder, rank, stream)


def _last(behaviour: Behaviour) -> Behaviour:
    """The same once every rank has begun, so the agents of all nodes have, too."""

    def act(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int | None:
        for other in range(spec.world_size):
            pid_of_rank(folder, other)
        return behaviour(spec, folder, rank, stream)

    return act


def raise_error(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int:
    raise ZeroDivisionError("planted")


def _record_error(what: str, kind: str, message: str) -> Behaviour:
    def act(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int:
        error = {"rank": rank, "step": 1, "what": what, "type": kind, "message": message}
        stream.write(ErrorRecord.from_json(error | {"traceback": ""}))
        return 1

    return act


def peer_lost(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int | None:
    """Wait for rank 0 to be gone, then report what gloo would."""
    told = "Connection closed by peer [127.0.0.1]:4242"
    while alive(pid_of_rank(folder, 0)):
        time.sleep(0.005)
    return _record_error("crashed", "RuntimeError", told)(spec, folder, rank, stream)


def pid_of_rank(folder: Path, rank: int) -> int:
    """Process id in the start record of a rank, once that is there."""
    while True:
        path = folder / f"rank{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        if "\n" in text:
            return int(StartRecord.from_json(json.loads(text.split("\n")[0])).pid)
        time.sleep(0.002)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def flood(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    line = b"x" * 99 + b"\n"
    for _ in range(20_000):
        os.write(2, line)
    os.write(2, b"the last words\n")


def print_both(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    sys.stdout.write("to stdout\n")
    sys.stderr.write("to stderr\n")


def print_then_die(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    sys.stdout.write("last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


def orphan_helper(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int | None:
    """Start a helper the way daemons do, wait for `go`, and fail if the helper is gone by then."""
    command = [sys.executable, "-c", DAEMON, str(folder / f"helper{rank}")]
    subprocess.run(command, check=True)
    helper = int((folder / f"helper{rank}").read_text())
    (folder / f"helped{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
    return None if alive(helper) else 5


DAEMON = """
import os, sys, time
pid = os.fork()
if pid == 0:
    time.sleep(3600)
open(sys.argv[1], "w").write(str(pid))
"""


def children(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    """Leave two children behind, one of them in a session of its own."""
    command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    same = subprocess.Popen(command)
    other = subprocess.Popen(command, start_new_session=True)
    (folder / f"children{rank}").write_text(f"{same.pid} {other.pid}")


def children_then_hang(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int:
    children(spec, folder, rank, stream)
    return hang(spec, folder, rank, stream)


def children_then_die(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    children(spec, folder, rank, stream)
    os.kill(os.getpid(), signal.SIGKILL)


def children_then_kill_leader(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> int:
    children(spec, folder, rank, stream)
    os.kill(os.getppid(), signal.SIGKILL)
    return sleep_for_ever()


def half_line(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    stream.file.write(dumps(step_record(1, rank))[:40])
    stream.file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def junk(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    os.write(stream.file.fileno(), b"\x00\xff\xfe junk \n[[[[\n")


def illegal_access(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
    os.abort()


def stop_self(spec: RunSpec, folder: Path, rank: int, stream: Stream) -> None:
    (folder / f"hanging{rank}").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


BEHAVIOURS: dict[str, Behaviour] = {
    "sigkill": _signal(signal.SIGKILL),
    "sigkill_last": _last(_signal(signal.SIGKILL)),
    "segv": _signal(signal.SIGSEGV),
    "exit13": _exit(13),
    "exit13_last": _last(_exit(13)),
    "exit256": _exit(256),
    "leave_early": _exit(0),
    "hang": hang,
    "hang_once": hang_once,
    "await_go": await_go,
    "ignore_term": ignore_term,
    "raise": raise_error,
    "raise_last": _last(raise_error),
    "oom": _record_error("oom", "OutOfMemoryError", "CUDA out of memory. Tried to allocate"),
    "error_exit0": lambda s, f, r, w: (_record_error("crashed", "E", "odd")(s, f, r, w), 0)[1],
    "peer_lost": peer_lost,
    "kill_leader": _signal_of(os.getppid),
    "kill_leader_last": _last(_signal_of(os.getppid)),
    "kill_server": _signal_of(grandparent),
    "flood": flood,
    "print": print_both,
    "print_then_die": print_then_die,
    "orphan_helper": orphan_helper,
    "children": children,
    "children_then_hang": children_then_hang,
    "children_then_die": children_then_die,
    "children_then_die_last": _last(children_then_die),
    "children_then_kill_leader": children_then_kill_leader,
    "half_line": half_line,
    "junk": junk,
    "illegal_access": illegal_access,
    "stop_self": stop_self,
}
