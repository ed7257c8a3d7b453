"""One process of a recorded run: when recording starts, how the process ends, what errors mean.

    interpreter starts -> torch is imported -> hooks, start record -> steps -> end or error record

Only the first process that a rank starts records: its children inherit the variables, but not the
file. One that replaces itself by `exec` before it trains begins anew. `harness.records` describes
what is written, and is not imported.
"""

import atexit
import faulthandler
import functools
import importlib.abc
import importlib.util
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from harness.provenance import about_rank, of_job, of_program, of_rank
from harness.recorder import (
    FOLDER_VARIABLE,
    JOB,
    RUN_VARIABLE,
    UNRECORDED,
    RecordFile,
    RecordsUnwritable,
    Ring,
    say,
    say_once,
)

SCHEMA = 1
PATIENCE_S = 30.0
"""How long the end of a job waits for its device to end the steps that are not written yet."""
MESSAGE_CHARS, TRACEBACK_CHARS = 4000, 8000


def patch(name: str, around: Callable[..., Any], *owners: Any) -> None:
    """Call `around(original, *args)` in the place of an attribute of the first owner.

    Other owners that have the original under any name get it, too.
    """
    first, *others = owners
    original = getattr(first, name)

    @functools.wraps(original)
    def ours(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    held = [(each, key) for each in others for key in vars(each) if vars(each)[key] is original]
    for owner, key in [(first, name), *held]:
        setattr(owner, key, ours)


class Session:
    """One rank's recording. `program` is what the run's specification says of the program.

    With a `ring` it is that of a job of its own, without a harness (`of_job`): the ring is where
    records go, and nothing that is wrong with them ends the job or keeps it waiting.

    Raises:
        FileExistsError: another process of this rank records.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self, folder: Path, rank: int, world_size: int, spec: Mapping[str, Any] | None = None,
        ring: int | None = None,
    ) -> None:  # fmt: skip
        if spec is None:
            spec = json.loads((folder / "spec.json").read_text())
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.key = os.environ.get(RUN_VARIABLE, "")
        self.is_job, self.patience_s = ring is not None, math.inf if ring is None else PATIENCE_S
        self.config: Mapping[str, Any] = spec["config"]
        self.program: Mapping[str, Any] = self.config["program"]
        self.keep: Mapping[str, Any] | None = spec.get("keep")
        self.operators: Mapping[str, Any] | None = spec.get("operators")
        self.rounding = int(spec.get("rounding", 0))
        self.sketch = str(spec.get("sketch", "none"))
        self.pid, self.step, self.is_over = os.getpid(), -1, False
        path = folder / f"rank{rank}.jsonl"
        if ring is None and _is_replaced(path):
            path.unlink()
        self._file = (
            RecordFile(path, is_new=True)
            if ring is None else Ring(folder / f"rank{rank}", ring, self._stop)
        )  # fmt: skip
        self.at_work: Callable[[BaseException], dict[str, str]] = lambda error: {}
        self.under_way: Callable[[], int] = lambda: -1
        self.leaving: Callable[..., None] = lambda *, has_failed: None
        self.left: Callable[[], None] = lambda: None
        self.finish: Callable[[], Mapping[str, Any]] = dict
        self.started_s, self.startup_s = time.monotonic() - age_s(), 0.0

    @property
    def is_mine(self) -> bool:
        return os.getpid() == self.pid and not self.is_over

    def write(self, kind: str, **record: Any) -> None:
        if not self.is_mine:
            return
        try:
            self._file.write({"rank": self.rank, **record, "kind": kind})
        except RecordsUnwritable as error:
            # Whatever is raised in a hook becomes the program's: a full disk is not.
            say(str(error))
            os._exit(UNRECORDED)

    def start(self, torch: Any) -> None:
        """Write the start record, and see to it that the end of the process is recorded."""
        cuda = torch.version.cuda is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        fingerprint, about = of_program(self.program.get("packages", {})), about_rank()
        if self.is_job:
            fingerprint, more = of_job()
            about |= more
        self.write(
            "start", schema=SCHEMA, run=self.key, world_size=self.world_size, pid=os.getpid(),
            device="cuda" if cuda else "cpu", tensors={}, taps=[], tap_stages=[],
            environment={"fingerprint": of_rank(torch) | fingerprint, **about},
        )  # fmt: skip
        before = sys.excepthook

        def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
            self.fail(error)
            before(kind, error, trace)

        sys.excepthook = excepthook
        atexit.register(self.end)

        def leave(original: Any, code: int) -> None:
            # As programs do whose libraries hang at exit.
            if code == 0 and threading.current_thread() is threading.main_thread():
                self.end()
            original(code)

        patch("_exit", leave, os)

    def _stop(self, why: str) -> None:
        """Of a job: what is recorded cannot be written."""
        self.is_over = True
        say_once(why)

    def fail(self, error: BaseException) -> None:
        if not self.is_mine or isinstance(error, SystemExit):
            return
        step = self.under_way()  # before what is left of it is written
        try:
            self.leaving(has_failed=True)
            self.finish()
        except Exception as late:  # noqa: BLE001 - after a failure the device may answer nothing
            say(f"the last steps are lost: {late}")
        first = _first(error)
        about = {"step": step, "what": classify(first), "raised_at": raised_at(first)}
        about |= self.at_work(first)
        # Read from the type: a program's exception may answer to any attribute name.
        tensors = getattr(first, "names", ()) if hasattr(type(first), "deltazero_what") else ()
        self._error(first, _words(first), **about, tensors=tensors, whole=error)

    def broken(self, error: Exception) -> None:
        """The recorder itself failed: the program goes on, and its run is not judged."""
        if self.is_mine:
            traceback.print_exception(error)
            message = f"the recorder could not observe the program: {error}"
            self._error(error, message, step=self.under_way(), what="unsupported", module="")

    def _error(
        self, error: BaseException, message: str, whole: BaseException | None = None, **about: Any
    ) -> None:
        text = "".join(traceback.format_exception(whole or error))[-TRACEBACK_CHARS:]
        about |= {"message": message[:MESSAGE_CHARS], "traceback": text}
        self.write("error", type=type(error).__name__, **about)
        self.is_over = True

    def end(self) -> None:
        """Write the end record; a program that recorded no step has none."""
        # The program may have put a hook for exceptions of its own in place of ours.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self.fail(error)
        if not self.is_mine:
            return
        try:
            self.leaving(has_failed=False)
            self.left()
            facts = self.finish()
        except Exception as error:  # noqa: BLE001 - as above
            self.broken(error)
            return
        if self.step >= 0:
            wall_s = time.monotonic() - self.started_s
            self.write("end", steps=self.step + 1, startup_s=self.startup_s, wall_s=wall_s, **facts)
        self.is_over = True


def _is_replaced(path: Path) -> bool:
    """Whether this process wrote there before an `exec`, and has recorded no step yet."""
    try:
        kinds = {(record := json.loads(line))["kind"]: record for line in path.open()}
        return bool(kinds["start"]["pid"] == os.getpid() and "step" not in kinds)
    except (OSError, ValueError, LookupError):
        return False


def _first(error: BaseException) -> BaseException:
    """The error that came first, where the clean-up of a `with` failed because of it.

    The end of a capture in which an operator was refused only says that there was an error.
    """
    while (first := error.__context__) is not None and not error.__suppress_context__:
        frames = traceback.walk_tb(error.__traceback__)
        if not any(frame.f_code.co_name == "__exit__" for frame, _ in frames):
            break
        error = first
    return error


def _words(error: BaseException) -> str:
    """The message of an exception; "" if its `__str__` raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever it is
        return ""


def raised_at(error: BaseException, but: tuple[str, ...] = ("torch", "harness")) -> str:
    """`file.py:line function` of the innermost frame of the program; "" without one.

    Frames in `but`, in the standard library and in generated code are not the program's.
    """
    others = {"", *but, *sys.stdlib_module_names}
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in others
    ]
    return places[-1] if places else ""


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


def _rank_and_size(*, trains: bool) -> tuple[int, int] | None:
    """This process's rank and their number: torchrun's, its group's, srun's, or alone; None for
    one to which torchrun gave none until it trains: it may be torchrun itself."""

    def said(*names: str) -> tuple[int, int] | None:
        rank, size = (os.environ.get(name, "") for name in names)
        return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else None

    if (found := said("RANK", "WORLD_SIZE")) is not None or not trains:
        return found
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return said("SLURM_PROCID", "SLURM_STEP_NUM_TASKS") or (0, 1)


def begin(*, trains: bool = False) -> Session | None:
    """Start recording in this process, in which torch can be imported; None if it is not to."""
    global _has_begun
    folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
    if FOLDER_VARIABLE not in os.environ or _has_begun:
        return None
    import torch

    session = None
    if (found := _rank_and_size(trains=trains)) is not None:
        _has_begun = True
        try:
            session = Session(folder, *found)
        except FileExistsError:
            return None  # the process that started this one records
    program = json.loads((folder / "spec.json").read_text())["config"]["program"]
    if program.get("determinism") == "enforce" and not trains:
        enforce_determinism(seed=0)
    if session is None:

        def made(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            # Once it has begun, there is a hook that ends here again.
            init = original if begin(trains=True) is None else torch.optim.Optimizer.__init__
            init(self, *args, **kwargs)

        patch("__init__", made, torch.optim.Optimizer)
        return None
    from harness.recorder import hooks

    session.start(torch)
    hooks.install(session)
    return session


def begin_job(folder: Path, ring: int, **program: Any) -> None:
    """Start recording in this process, of a job without a harness, unless it records already.

    Whatever is wrong is said once, and leaves the job as it is.
    """
    global _has_begun
    if _has_begun:
        return
    _has_begun = True
    try:
        import torch

        rank, size = _rank_and_size(trains=True) or (0, 1)
        spec = {"config": {"program": program, "taps": []}}
        session = Session(folder.absolute(), rank, size, spec, ring)
        from harness.recorder import hooks

        session.start(torch)
        session.write("event", name=JOB, step=0, detail={**program, "ring": ring})
        hooks.install(session)
    except Exception as error:  # noqa: BLE001 - whatever it is
        say_once(f"cannot record into {folder}: {error}")


def begin_in_interpreter() -> None:
    """See that recording starts right after the program's first import of torch.

    Earlier would import torch before the program has set the variables that torch reads. Under a
    run's leader, which ignores SIGUSR1 in what it starts, that signal prints all threads' stacks.
    """
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or (loader := cast("Any", spec.loader)) is None:
            return spec

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
TABLE: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "peer_lost": ("any", (), (
        "connection closed by peer", "connection reset by peer", "broken pipe",
        "connection refused", "connection was likely closed", "remote process exited",
        "socket timeout", "timed out waiting", "wait timeout after",
        "nccl communicator was aborted", "sendbytes failed", "recvvalue failed", "failed to recv",
        "monitoredbarrier",
    )),
    "mismatched": ("any", (), ("collective mismatch", "match expected size")),
    "illegal_access": ("any", (), ("illegal memory access", "cuda_error_illegal_address")),
    "out_of_memory": ("any", ("OutOfMemoryError", "MemoryError"),
                      ("cuda out of memory", "cuda_error_out_of_memory")),
    "no_host_memory": ("any", (), ("can't allocate memory",)),
    "no_group": ("any", (), (
        "could not resolve the process group", "process group has not been initialized",
        "invalid process group specified", "is not registered, please create group with",
    )),
    "port_in_use": ("distributed", (), ("address already in use", "eaddrinuse")),
    "rendezvous_timeout": (
        "distributed", ("RendezvousTimeoutError", "RendezvousConnectionError"),
        ("clients joined", "timed out waiting for clients", "client socket has timed out"),
    ),
    "nccl_system_error": (
        "distributed", (), ("ncclsystemerror", "nccl error: unhandled system error")
    ),
    "device_unavailable": ("cuda", (), ("cuda-capable device(s) is/are busy or unavailable",)),
    "memory_error": ("cuda", (), ("uncorrectable ecc error encountered",)),
    "of_device": ("any", ("AcceleratorError",), ("cuda", "nccl", "cublas", "cudnn")),
}  # fmt: skip
"""The one table in which words of other people's messages decide anything: name to

- whose exceptions count: torch.distributed's and gloo's, CUDA's, or any;
- types that say it by themselves;
- phrases in lower case, one of which is in the type and the message.
"""


def failures_of(kind: str, message: str) -> frozenset[str]:
    """What an exception means, names of `TABLE`; `kind` "" is what a process printed as it died."""
    text = f"{kind}: {message}".lower()
    is_cuda = kind in ("AcceleratorError", "RuntimeError") and message.startswith("CUDA error: ")
    is_gloo = kind == "RuntimeError" and _GLOO.match(message) is not None
    met = {"any": True, "cuda": is_cuda, "distributed": kind in DISTRIBUTED or is_gloo}
    return frozenset(
        name
        for name, (source, types, phrases) in TABLE.items()
        if kind in types or (met[source] and any(phrase in text for phrase in phrases))
    )


def classify(error: BaseException) -> str:
    """What an exception means, by its type; by CUDA's own words where the type says nothing."""
    if what := getattr(type(error), "deltazero_what", ""):
        return str(what)
    meant = failures_of(type(error).__name__, _words(error))
    if "out_of_memory" in meant or isinstance(error, MemoryError):
        return "oom"
    return "illegal_access" if "illegal_access" in meant else "crashed"
