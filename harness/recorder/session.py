"""One process of a recorded run: its file of records, when recording starts, how the process ends.

    interpreter starts -> torch is imported -> hooks, start record -> steps -> end or error record

Only the first process that a rank starts records: its children inherit the variables, but not the
file. What is written here is read by `harness.store.streams`; the kinds of records are described in
`harness.records`, which is not imported, so that a script's environment needs none of the harness.
"""

import atexit
import faulthandler
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from harness.provenance import about_rank, of_program, of_rank
from harness.recorder import (
    FOLDER_VARIABLE,
    RUN_VARIABLE,
    UNRECORDED,
    RecordsUnwritable,
    write_all,
)
from harness.recorder.library_errors import failures_of

SCHEMA = 1
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE")
SRUN_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
MESSAGE_CHARS, TRACEBACK_CHARS = 4000, 8000


class RecordFile:
    """Appends JSON lines; each is one write."""

    def __init__(self, path: Path) -> None:
        """Make the file.

        Raises:
            FileExistsError: another process of this rank records.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """Write one record.

        Raises:
            RecordsUnwritable: the disk has no room for the whole line.
            OSError: it could not be written for another reason.
        """
        plain = dict(record) | {"kind": kind}
        write_all(self._fd, (_line(plain) + "\n").encode())


def _line(plain: Mapping[str, Any]) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


class Session:
    """One rank's recording. `program` is what the run's specification says of the program."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        spec = json.loads((folder / "spec.json").read_text())
        self.folder, self.rank, self.world_size = folder, rank, world_size
        self.key = os.environ.get(RUN_VARIABLE, "")
        self.config: Mapping[str, Any] = spec["config"]
        self.program: Mapping[str, Any] = self.config["program"]
        self.keep: Mapping[str, Any] | None = spec.get("keep")
        self.rounding = int(spec.get("rounding", 0))
        self.file = RecordFile(folder / f"rank{rank}.jsonl")
        self.pid = os.getpid()
        self.step = -1
        self.has_failed = self.has_ended = False
        self.module_at_work: Callable[[BaseException], str] = lambda error: ""
        self.under_way: Callable[[], int] = lambda: -1
        self.leaving: Callable[..., None] = lambda *, has_failed: None
        self.finish: Callable[[], Mapping[str, Any]] = dict
        self.started_s = time.monotonic() - _age_s()
        self.startup_s = 0.0

    @property
    def is_mine(self) -> bool:
        """Whether this is the process that records, and not one that it forked."""
        return os.getpid() == self.pid and not (self.has_failed or self.has_ended)

    def write(self, kind: str, **record: Any) -> None:
        """Write a record of this rank; a process that this one forked writes nothing."""
        if self.is_mine:
            try:
                self.file.write(kind, {"rank": self.rank, **record})
            except RecordsUnwritable as error:
                # Whatever is raised in a hook becomes the program's: a full disk is not.
                sys.stderr.write(f"recorder: {error}\n")
                sys.stderr.flush()
                os._exit(UNRECORDED)

    def start(self, torch: Any) -> None:
        """Write the start record, and see to it that the end of the process is recorded."""
        cuda = torch.version.cuda is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        self.write(
            "start", schema=SCHEMA, run=self.key, world_size=self.world_size, pid=os.getpid(),
            device="cuda" if cuda else "cpu", tensors={}, taps=[], tap_stages=[],
            environment={
                "fingerprint": of_rank(torch) | of_program(self.program.get("packages", {})),
                **about_rank(),
            },
        )  # fmt: skip
        before = sys.excepthook

        def excepthook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
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
        text = "".join(traceback.format_exception(error))
        self.write(
            "error", step=step, what=classify(error), type=type(error).__name__,
            message=str(error)[:MESSAGE_CHARS], traceback=text[-TRACEBACK_CHARS:],
            module=self.module_at_work(error), tensors=_names(error),
        )  # fmt: skip
        self.has_failed = True

    def broken(self, error: Exception) -> None:
        """The recorder itself failed: the program goes on, and its run is not judged."""
        if self.is_mine:
            text = "".join(traceback.format_exception(error))
            sys.stderr.write(text)
            self.write(
                "error", step=self.under_way(), what="unsupported", type=type(error).__name__,
                message=f"the recorder could not observe the program: {error}"[:MESSAGE_CHARS],
                traceback=text[-TRACEBACK_CHARS:], module="",
            )  # fmt: skip
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
            self.write(
                "end", steps=self.step + 1, startup_s=self.startup_s,
                wall_s=time.monotonic() - self.started_s, **facts,
            )  # fmt: skip
        self.has_ended = True


def _age_s() -> float:
    """Seconds since this process started, by the kernel's clock."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(up_s - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0


def _names(error: BaseException) -> tuple[str, ...]:
    """The tensors that an error of the recorder names."""
    return tuple(getattr(error, "names", ())) if hasattr(error, "deltazero_what") else ()


def classify(error: BaseException) -> str:
    """What an exception means, by its type; by CUDA's own words where the type says nothing."""
    if what := getattr(error, "deltazero_what", ""):
        return str(what)
    meant = failures_of(type(error).__name__, str(error))
    if "out_of_memory" in meant or isinstance(error, MemoryError):
        return "oom"
    return "illegal_access" if "illegal_access" in meant else "crashed"


def enforce_determinism(seed: int | None = None) -> None:
    """Ask for deterministic kernels, and seed every default generator if a seed is given."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.use_deterministic_algorithms(True)
    # Filling new memory costs a kernel an allocation and decides no bit of a right program.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if seed is None:
        return
    import random

    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def rank_and_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This process's rank and their number, as torchrun says; None if it does not."""
    return _numbers(environ, *TORCHRUN_VARIABLES)


def _numbers(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int] | None:
    found = environ.get(rank, ""), environ.get(size, "")
    return (int(found[0]), int(found[1])) if all(map(str.isdigit, found)) else None


def _found_by_itself() -> tuple[int, int]:
    """Rank and number of a process that trains without torchrun: its group's, srun's, or alone."""
    import torch.distributed as dist

    if (found := rank_and_size()) is not None:
        return found
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return _numbers(os.environ, *SRUN_VARIABLES) or (0, 1)


_has_begun = False


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
    import torch

    program = json.loads((folder / "spec.json").read_text())["config"]["program"]
    if program.get("determinism") == "enforce":
        enforce_determinism(seed=0)
    optimizer_type = torch.optim.Optimizer
    original = optimizer_type.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if begin(trains=True) is not None:
            optimizer_type.__init__(self, *args, **kwargs)  # by now a hook that ends here again
        else:
            original(self, *args, **kwargs)

    optimizer_type.__init__ = made  # type: ignore[method-assign]


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

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader)
        return spec


class _TorchLoader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._inner
        begin()
