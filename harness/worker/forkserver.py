"""`python -m harness.worker.forkserver local | node`: how engines start what imports torch.

local  a forkserver on this machine, for the local engine: it forks a leader for every run
node   the agent of one node of a Slurm step, started through srun: it forks its ranks

The forkserver:

    harness -> server   {"start": key, "folder": path, "devices": [...], "after": key, ...}
    server -> harness   {"ready": pid} | {"failed": why}
                        {"started": key, "pid": pid}
                        {"exited": key, "status": code}   negative: signal; null: never forked

`after` names the run whose devices this one takes over, "" for none: its ranks wait for the end of
that run before they make a model (`harness.engine.machine.wait_for_go`).

One JSON object a line over a socket pair. The server imports torch, touches no device, starts no
thread, and waits in one place. When the harness goes away, however it does, the socket closes: the
server kills what is left of every run and exits, stopped as it may have been.
"""

import argparse
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from harness.engine.machine import (
    ChildWakeup,
    adopt_orphans,
    await_children,
    kill_children,
    kill_group,
    signal_quietly,
    wake_as_parent_dies,
)
from harness.engine.outcome import look_again
from harness.engine.ranks import (
    Job,
    Limits,
    RankMain,
    die_as_child_of,
    lead,
    lead_share,
    own_address,
)
from harness.engine.slurm import STEP_FILE, Step, ask
from harness.errors import HarnessError, Infrastructure, UsageError
from harness.records import RunSpec
from harness.store import SPEC_FILE
from harness.store.files import write_atomic


def serve(fd: int, entry: str, limits: Limits) -> int:
    """Serve runs of an entry, `module:function`, over the inherited socket `fd` until it closes."""
    control = socket.socket(fileno=fd)
    adopt_orphans()
    wake_as_parent_dies()
    try:
        rank_main = _load_while_wanted(control, entry)
    except Exception as error:  # noqa: BLE001 - user code at import: told to the harness
        _send(control, {"failed": f"{entry}: {type(error).__name__}: {error}"})
        return 1
    # Kept out of collections, whose writes to object headers would copy shared pages in every rank.
    gc.collect()
    gc.freeze()
    _Server(control, rank_main, limits).run()
    return 0


def _load_while_wanted(control: socket.socket, entry: str) -> RankMain:
    """`load_entry`, given up as soon as the harness is gone: importing torch takes seconds."""

    def leave(*_: object) -> None:
        try:
            gone = not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            gone = True
        if gone:
            os._exit(0)

    # What the kernel sends as the parent dies; of a thread of the harness, too, which is no end.
    before = signal.signal(signal.SIGCONT, leave)
    try:
        leave()  # it may have gone before there was anything to wake
        return load_entry(entry)
    finally:
        signal.signal(signal.SIGCONT, before)


def load_entry(entry: str) -> RankMain:
    """Import `module:function`; what the module imports is warm in every rank."""
    module, _, function = entry.partition(":")
    if not module or not function:
        raise ValueError(f"expected module:function, got {entry!r}")
    return cast("RankMain", getattr(importlib.import_module(module), function))


def open_torch_store(listener: socket.socket) -> object:
    """Host a `TCPStore` on a listening socket, which it takes over."""
    import torch.distributed as dist

    host, port = listener.getsockname()[:2]
    # As its own first client: a socket that listens everywhere listens here too.
    host = "127.0.0.1" if host == "0.0.0.0" else host
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def open_store(listener: socket.socket) -> object:
    """The torch store where torch is loaded, else (ranks without torch) just the socket."""
    return open_torch_store(listener) if "torch" in sys.modules else listener


class _Server:
    def __init__(self, control: socket.socket, rank_main: RankMain, limits: Limits) -> None:
        self._control, self._rank_main, self._limits = control, rank_main, limits
        self._leaders: dict[int, str] = {}
        # By the run that must end first: where to say "go", to how many.
        self._gates: dict[str, tuple[int, int]] = {}
        self._received = b""
        self._wakeup = ChildWakeup()

    def run(self) -> None:
        poll = select.poll()
        for fd in (self._control.fileno(), self._wakeup.fd):
            poll.register(fd, select.POLLIN)
        try:
            _send(self._control, {"ready": os.getpid()})
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if self._wakeup.fd in ready:
                    self._wakeup.drain()
                self._reap()
                if self._control.fileno() in ready and not self._receive():
                    return
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            for pid in self._leaders:
                signal_quietly(pid, signal.SIGKILL)  # its ranks die with it
            await_children()
            kill_children()

    def _receive(self) -> bool:
        data = self._control.recv(1 << 16)
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._start(json.loads(line))
        return bool(data)

    def _start(self, command: dict[str, Any]) -> None:
        key, folder = command["start"], Path(command["folder"])
        mine, after, gate_fd = os.getpid(), command["after"], None
        try:
            if after in self._leaders.values():
                gate_fd, go_fd = os.pipe2(os.O_CLOEXEC)
                if after in self._gates:  # of a run that failed as it waited
                    os.close(self._gates[after][0])
                self._gates[after] = go_fd, command["num_ranks"] + 1
            pid = os.fork()
        except OSError as error:
            why = {"why": str(error), "errno": error.errno}
            _send(self._control, {"exited": key, "status": None, **why})
            return
        if pid == 0:
            work = partial(self._lead, command, folder, gate_fd)
            die_as_child_of(mine, work, folder / "leader.stderr")
        if gate_fd is not None:
            os.close(gate_fd)
        self._leaders[pid] = key
        _send(self._control, {"started": key, "pid": pid})

    def _lead(self, command: dict[str, Any], folder: Path, gate_fd: int | None) -> None:
        ChildWakeup.disarm()
        self._control.close()
        self._wakeup.close()
        for go_fd, _ in self._gates.values():
            os.close(go_fd)
        spec = RunSpec.from_json(json.loads((folder / "spec.json").read_bytes()))
        job = Job(
            spec=spec, folder=folder, ranks=range(spec.world_size), attempt=command["attempt"],
            devices=tuple(command["devices"]), gate_fd=gate_fd,
        )  # fmt: skip
        lead(job, self._rank_main, open_store, self._limits)

    def _reap(self) -> None:
        """Tell of leaders that ended, after killing what they left behind."""
        ended: list[tuple[str, int]] = []
        for pid in list(self._leaders):
            # Peek first: until it is reaped, its process group cannot be another's.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)
            _, status = os.waitpid(pid, 0)
            ended.append((self._leaders.pop(pid), os.waitstatus_to_exitcode(status)))
        # Children that are not leaders are orphans of a leader that died.
        kill_children(spare=self._leaders)
        for key, code in ended:
            if key in self._gates:
                go_fd, readers = self._gates.pop(key)
                with suppress(BrokenPipeError):  # all of them are gone
                    os.write(go_fd, bytes(readers))
                os.close(go_fd)
            _send(self._control, {"exited": key, "status": code})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.sendall(json.dumps(message).encode() + b"\n")


# --- the agent of a node; those of a step meet at the port that the first one's has taken ---------

VISIBLE_S = 90.0
"""How long a file may take to show on another node; caches of NFS hold for 60 s at most."""
MEETING_FILE = "meeting.json"


def run_node(folder: Path, name: str, entry: str, limits: Limits) -> int:
    """The ranks of this node of a step; the exit code. Raises as `_await_object` and `_devices`."""
    step = Step.from_json(_await_object(folder / STEP_FILE, name))
    spec = RunSpec.from_json(json.loads((folder / SPEC_FILE).read_bytes()))
    node = int(os.environ["SLURM_PROCID"])
    ranks = step.ranks(node, spec.world_size)
    listener = _host(folder, step) if node == 0 else None
    found = _await_object(folder / MEETING_FILE, name)
    job = Job(
        spec=spec, folder=folder, ranks=ranks, devices=_devices(spec, len(ranks)),
        address=found["address"], port=found["port"], listener=listener, stops_on_sigterm=True,
    )  # fmt: skip
    rank_main = load_entry(entry)
    # As in the forkserver: what is alive now is shared with every rank, if nobody writes to it.
    gc.collect()
    gc.freeze()
    return lead_share(job, name, node, rank_main, open_store, limits)


def _host(folder: Path, step: Step) -> socket.socket:
    address = "127.0.0.1" if step.num_nodes == 1 else _address()
    here = "127.0.0.1" if address.startswith("127.") else ""
    listener = socket.create_server((here, 0), backlog=1024)
    told = {"name": step.name, "address": address, "port": listener.getsockname()[1]}
    write_atomic(folder / MEETING_FILE, json.dumps(told) + "\n")
    return listener


def _address() -> str:
    """As the last node reaches this one, whose name often stands for a loopback address."""
    listed = ask("scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", ""))
    last = (listed.split() or [socket.gethostname()])[-1]
    match = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "-o", "show", "node", last))
    return own_address(match.group(1) if match else last) or socket.gethostname()


def _await_object(path: Path, name: str) -> dict[str, Any]:
    """A file of the step of that name, once it shows; `Infrastructure` if it does not."""
    until_s = time.monotonic() + VISIBLE_S
    while time.monotonic() < until_s:
        # The run folder may have taken the place of another of that name.
        look_again(path.parent.parent)
        look_again(path.parent)
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(path.read_bytes())
            if found.get("name") == name:
                return found
        time.sleep(0.05)
    raise Infrastructure(
        f"{path} is not visible on this node ({socket.gethostname()}), or is of another step: "
        "put --out on a file system that all nodes share"
    )


def _devices(spec: RunSpec, count: int) -> tuple[str, ...]:
    """The GPUs of the ranks here as CUDA_VISIBLE_DEVICES has them; `UsageError` if too few."""
    if spec.device != "cuda":
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = [str(i) for i in range(count)] if named is None else [n for n in named.split(",") if n]
    if len(seen) < count:
        raise UsageError(f"run {spec.key} needs {count} GPUs here, this node gives {len(seen)}")
    return tuple(seen[:count])


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and do what it says; the exit code."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--entry", required=True)
    common.add_argument("--limits", required=True, help="of a leader, as JSON")
    parser = argparse.ArgumentParser(prog="python -m harness.worker.forkserver")
    commands = parser.add_subparsers(dest="command", required=True)
    server = commands.add_parser("local", help="fork runs for a harness", parents=[common])
    server.add_argument("--fd", type=int, required=True, help="socket of that harness")
    node = commands.add_parser("node", help="the ranks of a node of a step", parents=[common])
    node.add_argument("--folder", type=Path, required=True)
    node.add_argument("--name", required=True)
    chosen = parser.parse_args(arguments)
    limits = Limits.from_json(json.loads(chosen.limits))
    try:
        if chosen.command == "local":
            return serve(chosen.fd, chosen.entry, limits)
        return run_node(chosen.folder, chosen.name, chosen.entry, limits)
    except HarnessError as error:
        sys.stderr.write(f"harness: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
