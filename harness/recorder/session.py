"""One process of a recorded run: its file of records, when recording starts, how the process ends.

    interpreter starts -> torch is imported -> hooks, start record -> steps -> end or error record

Only the first process that a rank starts records: its children inherit the variables, but not the
file. `harness.store.streams` reads what is written here; `harness.records` describes it, and is not
imported, so that a script's environment needs none of the harness.

At the end: what exceptions of libraries mean, by type, and by words where the type does not say it.
"""

import atexit
import faulthandler
import functools
import importlib.abc
import importlib.util
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from harness.provenance import about_rank, of_program, of_rank
from harness.recorder import (
    FOLDER_VARIABLE,
    RUN_VARIABLE,
    UNRECORDED,
    RecordsUnwritable,
    write_all,
)

SCHEMA = 1
MESSAGE_CHARS, TRACEBACK_CHARS = 4000, 8000


def patch(name: str, around: Callable[..., Any], *owners: Any) -> Callable[[], None]:
    """Call `around(original, *args)` in the place of an attribute of the first owner.

    What the other owners have under any name, if it is the original, is replaced as well. The
    result undoes the first one, unless others have patched it since.
    """
    first, *others = owners
    original = getattr(first, name)

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    held = [(each, key) for each in others for key in vars(each) if vars(each)[key] is original]
    for owner, key in [(first, name), *held]:
        setattr(owner, key, ours)

    def undo() -> None:
        if getattr(first, name) is ours:
            setattr(first, name, original)

    return undo


class Session:
    """One rank's recording. `program` is what the run's specification says of the program.

    Raises:
        FileExistsError: another process of this rank records.
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        spec = json.loads((folder / "spec.json").read_text())
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.key = os.environ.get(RUN_VARIABLE, "")
        self.config: Mapping[str, Any] = spec["config"]
        self.program: Mapping[str, Any] = self.config["program"]
        self.keep: Mapping[str, Any] | None = spec.get("keep")
        self.rounding = int(spec.get("rounding", 0))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(folder / f"rank{rank}.jsonl", flags, 0o644)
        self.pid, self.step = os.getpid(), -1
        self.has_failed = self.has_ended = False
        self.module_at_work: Callable[[BaseException], str] = lambda error: ""
        self.under_way: Callable[[], int] = lambda: -1
        self.leaving: Callable[..., None] = lambda *, has_failed: None
        self.finish: Callable[[], Mapping[str, Any]] = dict
        self.started_s, self.startup_s = time.monotonic() - age_s(), 0.0

    @property
    def is_mine(self) -> bool:
        """Whether this is the process that records, and not one that it forked."""
        return os.getpid() == self.pid and not (self.has_failed or self.has_ended)

    def write(self, kind: str, **record: Any) -> None:
        """Write a record of this rank, in one write; a process that it forked writes nothing."""
        if not self.is_mine:
            return
        plain = {"rank": self.rank, **record, "kind": kind}
        line = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
        try:
            write_all(self._fd, (line + "\n").encode())
        except RecordsUnwritable as error:
            # Whatever is raised in a hook becomes the program's: a full disk is not.
            sys.stderr.write(f"recorder: {error}\n")
            sys.stderr.flush()
            os._exit(UNRECORDED)

    def start(self, torch: Any) -> None:
        """Write the start record, and see to it that the end of the process is recorded."""
        cuda = torch.version.cuda is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        fingerprint = of_rank(torch) | of_program(self.program.get("packages", {}))
        self.write(
            "start", schema=SCHEMA, run=self.key, world_size=self.world_size, pid=os.getpid(),
            device="cuda" if cuda else "cpu", tensors={}, taps=[], tap_stages=[],
            environment={"fingerprint": fingerprint, **about_rank()},
        )  # fmt: skip
        before = sys.excepthook

        def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
            self.fail(error)
            before(kind, error, trace)

        sys.excepthook = excepthook
        atexit.register(self.end)

    def fail(self, error: BaseException) -> None:
        """Write what ended the program."""
        if not self.is_mine or isinstance(error, SystemExit):
            return
        step = self.under_way()  # before what is left of it is written
        try:
            self.leaving(has_failed=True)
            self.finish()
        except Exception as late:  # noqa: BLE001 - after a failure the device may answer nothing
            sys.stderr.write(f"recorder: the last steps are lost: {late}\n")
        tensors = getattr(error, "names", ()) if hasattr(error, "deltazero_what") else ()
        self._error(
            error, step=step, what=classify(error), message=str(error),
            module=self.module_at_work(error), tensors=tensors,
        )  # fmt: skip

    def broken(self, error: Exception) -> None:
        """The recorder itself failed: the program goes on, and its run is not judged."""
        if self.is_mine:
            traceback.print_exception(error)
            message = f"the recorder could not observe the program: {error}"
            self._error(
                error, step=self.under_way(), what="unsupported", message=message, module=""
            )

    def _error(self, error: BaseException, *, message: str, **about: Any) -> None:
        text = "".join(traceback.format_exception(error))[-TRACEBACK_CHARS:]
        about |= {"message": message[:MESSAGE_CHARS], "traceback": text}
        self.write("error", type=type(error).__name__, **about)
        self.has_failed = True

    def end(self) -> None:
        """Write the end record; a program that recorded no step has none."""
        if not self.is_mine:
            return
        try:
            self.leaving(has_failed=False)
            facts = self.finish()
        except Exception as error:  # noqa: BLE001 - as above
            self.broken(error)
            return
        if self.step >= 0:
            wall_s = time.monotonic() - self.started_s
            self.write("end", steps=self.step + 1, startup_s=self.startup_s, wall_s=wall_s, **facts)
        self.has_ended = True


def age_s() -> float:
    """Seconds since this process started, by the kernel's clock."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(up_s - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0


def enforce_determinism(seed: int | None = None) -> None:
    """Ask for deterministic kernels, and seed every default generator if a seed is given."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.use_deterministic_algorithms(True)
    # Filling new memory costs a kernel an allocation and decides no bit of a right program.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if seed is not None:
        import random

        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)


# --- when recording begins ---------------------------------------------------------------------

_has_begun = False


def rank_and_size(names: tuple[str, str] = ("RANK", "WORLD_SIZE")) -> tuple[int, int] | None:
    """This process's rank and their number, as torchrun's variables say; None if they do not."""
    rank, size = (os.environ.get(name, "") for name in names)
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else None


def _found_by_itself() -> tuple[int, int]:
    """Rank and number of a process that trains without torchrun: its group's, srun's, or alone."""
    import torch.distributed as dist

    if (found := rank_and_size()) is not None:
        return found
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return rank_and_size(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")) or (0, 1)


def begin(*, trains: bool = False) -> Session | None:
    """Start recording in this process, in which torch can be imported; None if it is not to.

    One to which torchrun gave no rank records only once it `trains`: it may be torchrun itself.
    """
    global _has_begun
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or _has_begun:
        return None
    found = _found_by_itself() if trains else rank_and_size()
    if found is None:
        _begin_with_the_first_optimizer(Path(folder))
        return None
    import torch

    from harness.recorder import hooks

    _has_begun = True
    try:
        session = Session(Path(folder), *found)
    except FileExistsError:
        return None  # the process that started this one records
    if session.program.get("determinism") == "enforce" and not trains:
        enforce_determinism(seed=0)
    session.start(torch)
    hooks.install(session)
    return session


def _begin_with_the_first_optimizer(folder: Path) -> None:
    from torch.optim import Optimizer

    program = json.loads((folder / "spec.json").read_text())["config"]["program"]
    if program.get("determinism") == "enforce":
        enforce_determinism(seed=0)

    def made(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        # Once it has begun, there is a hook that ends here again.
        init = original if begin(trains=True) is None else Optimizer.__init__
        init(self, *args, **kwargs)

    patch("__init__", made, Optimizer)


def tell_stacks() -> None:
    """Print the stacks of all threads at SIGUSR1, and at a fatal signal, under a run's leader.

    It ignores that signal in the processes that it starts; elsewhere the program may use it.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def begin_when_torch_is_imported() -> None:
    """Start recording right after the program's first import of torch.

    Earlier would import torch before the program has set the variables that torch reads.
    """
    sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as the others do, and starts the session once it is imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # from here on it is that of its class
            loader.exec_module(module)
            begin()

        loader.exec_module = exec_module
        return spec


# --- what exceptions mean ----------------------------------------------------------------------

DISTRIBUTED = (
    "DistError", "DistBackendError", "DistNetworkError", "DistStoreError",
    "RendezvousTimeoutError", "RendezvousConnectionError",
)  # fmt: skip
"""Types that torch.distributed raises for NCCL, the store and the network."""
_GLOO = re.compile(r"\[(?:enforce fail at )?[^\]\s]*/gloo/[^\]\s]+:\d+\] ")
"""How what gloo throws begins: the place in its sources."""


class LibraryError(NamedTuple):
    """An entry of the one table in which words of other people's messages decide anything.

    Attributes:
        phrases: in lower case; one of them is in the type and the message.
        source: whose exceptions count: torch.distributed's and gloo's, CUDA's, or any.
        types: that say it by themselves.
    """

    name: str
    phrases: tuple[str, ...]
    source: Literal["any", "distributed", "cuda"] = "any"
    types: tuple[str, ...] = ()


TABLE = (
    LibraryError("peer_lost", (
        "connection closed by peer", "connection reset by peer", "broken pipe",
        "connection refused", "connection was likely closed", "remote process exited",
        "socket timeout", "timed out waiting", "wait timeout after",
        "nccl communicator was aborted", "sendbytes failed", "recvvalue failed", "failed to recv",
    )),
    LibraryError("mismatched", ("collective mismatch", "match expected size")),
    LibraryError("illegal_access", ("illegal memory access", "cuda_error_illegal_address")),
    LibraryError("out_of_memory", ("cuda out of memory", "cuda_error_out_of_memory"),
                 types=("OutOfMemoryError", "MemoryError")),
    LibraryError("no_host_memory", ("can't allocate memory",)),
    LibraryError("no_group", (
        "could not resolve the process group", "process group has not been initialized",
        "invalid process group specified",
    )),
    LibraryError("port_in_use", ("address already in use", "eaddrinuse"), "distributed"),
    LibraryError("rendezvous_timeout", (
        "clients joined", "timed out waiting for clients", "client socket has timed out",
    ), "distributed", ("RendezvousTimeoutError", "RendezvousConnectionError")),
    LibraryError("nccl_system_error", ("ncclsystemerror", "nccl error: unhandled system error"),
                 "distributed"),
    LibraryError("device_unavailable", ("cuda-capable device(s) is/are busy or unavailable",),
                 "cuda"),
    LibraryError("memory_error", ("uncorrectable ecc error encountered",), "cuda"),
    LibraryError("of_device", ("cuda", "nccl", "cublas", "cudnn"), types=("AcceleratorError",)),
)  # fmt: skip


def failures_of(kind: str, message: str) -> frozenset[str]:
    """Names of what an exception means; none for most of them.

    Args:
        kind: name of its type; "" for what a process printed as it died.
        message: its text.
    """
    text = f"{kind}: {message}".lower()
    is_cuda = kind in ("AcceleratorError", "RuntimeError") and message.startswith("CUDA error: ")
    is_gloo = kind == "RuntimeError" and _GLOO.match(message) is not None
    met = {"any": True, "cuda": is_cuda, "distributed": kind in DISTRIBUTED or is_gloo}
    return frozenset(
        name
        for name, phrases, source, types in TABLE
        if kind in types or (met[source] and any(phrase in text for phrase in phrases))
    )


def classify(error: BaseException) -> str:
    """What an exception means, by its type; by CUDA's own words where the type says nothing."""
    if what := getattr(error, "deltazero_what", ""):
        return str(what)
    meant = failures_of(type(error).__name__, str(error))
    if "out_of_memory" in meant or isinstance(error, MemoryError):
        return "oom"
    return "illegal_access" if "illegal_access" in meant else "crashed"
