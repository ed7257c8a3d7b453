"""The agent of one node of a Slurm step: imports torch once, forks its ranks, reports.

The agents of a step meet at the port that the first node's has taken and written to meeting.json.
"""

import gc
import json
import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.engine.outcome import look_again
from harness.engine.ranks import Job, Limits, lead_share, own_address
from harness.engine.slurm import STEP_FILE, Step, ask
from harness.errors import Infrastructure, UsageError
from harness.records import RunSpec
from harness.store import SPEC_FILE
from harness.store.files import write_atomic
from harness.worker.serve import load_entry, open_store

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
    """Take a port, and tell the other nodes."""
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
