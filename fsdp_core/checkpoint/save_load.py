"""Save and load model and optimizer through torch Distributed Checkpoint, bit for bit.

    save(folder, 10, model, optimizer, {"tokens": 5}, keep=3)   all ranks; returns when complete
    pending = save_async(...)                                   returns once copied to the CPU
    latest(folder)                                              10
    loaded = load(folder, model, optimizer)                     all ranks; any world, any strategy

Main weights, buffers, optimizer states and hyperparameters, and `extra`; no gradients, no random
numbers. What is loaded may have another number of ranks, another strategy, other units, or none:
tensors are called by parameter names and hold true row offsets. `torch.distributed.checkpoint.load`
reads the folders too, under `model.<name>` and `optimizer.state.<name>.<key>`.

Modules of another library have the same names (`param_sharding`), and beside them states of
their own, such as scales of eight-bit numbers: who has none takes none, and who finds none keeps
what it has and warns.

`files` says why a crash harms no complete checkpoint, `state` what is stored.

Pipeline stages are given as a list. What modules say is cut over an axis, tensor or expert
parallel, is stored as the tensor of the model that is not cut: any product of layouts, or one
process, loads what any other has saved. Copies of a piece that ranks share are compared, so a save
of ranks that have drifted apart fails.

Ranks talk over a gloo group of their own, made by the first call, so that an asynchronous save and
training do not meet. Saves of one process follow each other; another process that saves into the
same folder is refused. What fails on one rank raises on all of them.
"""

import contextlib
import traceback
import warnings
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from fsdp_core.checkpoint.files import (
    CheckpointError,
    StepWriter,
    check_files,
    complete_steps,
    find_step,
    read_document,
)
from fsdp_core.checkpoint.fit import Fit, check_complete
from fsdp_core.checkpoint.pieces import local_pieces, on_cpu
from fsdp_core.checkpoint.state import (
    Modules,
    OptimizerView,
    RankState,
    check_equal,
    checksum,
    describe,
    fsdp_groups,
    held_twice,
    merge,
    rename_differing,
    saved_state,
)
from fsdp_core.fsdp.api import FSDPModule

__all__ = ["CheckpointError", "Loaded", "PendingSave", "latest", "load", "save", "save_async"]

_own_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]
_own_groups = weakref.WeakKeyDictionary()
_unsettled: "list[PendingSave]" = []

Model = nn.Module | Sequence[nn.Module]
"""A model, or the stages that this rank has of one, in a list."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded beside model and optimizer.

    Attributes:
        step: of the checkpoint.
        extra: as it was saved.
        path: the checkpoint.
    """

    step: int
    extra: dict[str, Any]
    path: Path


def latest(folder: str | Path) -> int | None:
    """The last complete step in `folder`; None if there is none. Not a collective."""
    steps = complete_steps(Path(folder))
    return steps[-1] if steps else None


def save(
    folder: str | Path,
    step: int,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    *,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save as `folder/step-<step>`, on the disk when this returns. A collective.

    Args:
        folder: shared by all ranks.
        step: not saved before.
        model: with FSDP units or without; units may be gathered. A list: stages, whose names are
            those of the whole model, so that ranks have other names.
        optimizer: over the model's parameters.
        extra: JSON values, tuples and tensors; the same on all ranks.
        keep: complete checkpoints that stay, this one among them; the lowest steps go first, once
            this one is complete. None: all.
        group: ranks that save, with a CPU backend. None: all, over a gloo group of their own with
            the default group's timeout.

    Raises:
        ValueError: an argument out of range; the step exists; something that cannot be stored;
            another process saves into the folder; copies of one piece differ between ranks.
        CheckpointError: a rank failed or died. Complete checkpoints are as before.
    """
    job = _Save(folder, step, keep, group)
    try:
        tensors = job.prepare(model, optimizer, extra)
        with job.ranks.errors():
            dcp.save(tensors, **job.options)
    finally:
        job.writer.release()
    return job.writer.complete_path


class PendingSave:
    """A save under way. `wait` for it, or the next save or load does and raises what it raised."""

    def __init__(self, job: "_Save", future: "Future[Any]") -> None:
        self._job, self._future = job, future
        self.path = job.writer.complete_path

    def done(self) -> bool:
        """Whether the save is over, well or not."""
        return self._future.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete; its path. Every rank has to, before it leaves.

        Raises:
            CheckpointError: a rank failed or died. Complete checkpoints are as before.
        """
        if self in _unsettled:
            _unsettled.remove(self)
        with self._job.ranks.errors():
            self._future.result()
        return self.path


def save_async(
    folder: str | Path,
    step: int,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    *,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Like `save`, but return once everything is copied to the CPU: training may go on at once.

    A thread writes, and completes the checkpoint whether or not anybody waits. `group` must not be
    used meanwhile.

    Raises:
        As `save`, for what goes wrong before the writing; the rest, `PendingSave.wait` raises.
    """
    job = _Save(folder, step, keep, group)
    try:
        tensors = job.prepare(model, optimizer, extra)
        with job.ranks.errors():
            future = dcp.async_save({k: on_cpu(t) for k, t in tensors.items()}, **job.options)
    except BaseException:
        job.writer.release()
        raise
    assert isinstance(future, Future)
    future.add_done_callback(job.end)
    pending = PendingSave(job, future)
    _unsettled.append(pending)
    return pending


def load(
    folder: str | Path,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load the checkpoint of `step`, or the latest, into model and optimizer. A collective.

    All is checked before anything is changed: that names, shapes and dtypes fit, and that every
    file holds the bytes that were written. Tensors are loaded in place where they are, gathered
    units are released, and copies of weights follow. How an optimizer computes (`foreach`, `fused`,
    `capturable`, `differentiable`) stays as it was built, all other hyperparameters are loaded.

    Raises:
        ValueError: no such checkpoint, or it does not fit the model or the optimizer.
        CheckpointError: missing or damaged files; or a rank failed or died, which may leave the
            model half loaded if it was while reading.
    """
    ranks = _Ranks(f"Loading from {folder}", group)
    wrapper, modules = ranks.wrapper, _modules(model)
    checked: list[dict[str, Any]] = []

    def check() -> None:
        document = read_document(path)
        check_files(path, document, wrapper.get_rank(), wrapper.get_world_size())
        checked.append(document)

    with ranks.errors():
        path = wrapper.broadcast("find", lambda: find_step(Path(folder), step))
        ranks.doing = f"Loading {path}"
        wrapper.all_gather("check", check)
        fit = Fit(checked[0], wrapper.get_rank(), wrapper.get_world_size())
        for module in (m for stage in modules for m in stage.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()
        reader = dcp.FileSystemReader(path)
        found = wrapper.all_gather(
            "fit",
            lambda: fit.choose(
                reader.read_metadata(), modules, optimizer, are_stages=_are_stages(model)
            ),
        )
        check_complete(checked[0]["model"], found)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(fit.targets, storage_reader=reader, planner=planner, **ranks.options)
        wrapper.all_gather("apply", fit.apply)
    with torch.no_grad():
        for parameters in fsdp_groups(modules):
            parameters.main_weight_changed()
    return Loaded(checked[0]["step"], fit.extra, path)


def _are_stages(model: Model) -> bool:
    return not isinstance(model, nn.Module)


def _modules(model: Model) -> Modules:
    return [model] if isinstance(model, nn.Module) else list(model)


class _Ranks:
    """The ranks that save or load, and what becomes of their errors."""

    def __init__(self, doing: str, group: dist.ProcessGroup | None) -> None:
        for pending in list(_unsettled):
            pending.wait()
        self.doing = doing
        in_use = dist.is_initialized()
        if group is not None and torch.device("cpu") not in group._device_types:
            raise ValueError(f"Expected a group with a CPU backend, got {group._device_types}.")
        if not in_use:
            # DCP says so each time, from the thread that writes as well.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        self.group = group or (_own_group() if in_use else None)
        self.wrapper = _DistWrapper(self.group, in_use, 0)
        self.options: dict[str, Any] = {"process_group": self.group, "no_dist": not in_use}

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise what failed on any rank, on every rank, in one line."""
        try:
            yield
        except CheckpointException as error:
            failures = {rank: cause for rank, (cause, _) in sorted(error.failures.items())}
            rank, cause = next(iter(failures.items()))
            where = f"rank {rank}" if len(failures) == 1 else f"ranks {list(failures)}, on {rank}"
            kind = ValueError if isinstance(cause, ValueError) else CheckpointError
            text = f"{self.doing} failed on {where} with {type(cause).__name__}: {cause}"
            raise kind(text) from error
        except RuntimeError as error:
            # What a rank does itself comes as above: this is the talking that failed.
            text = f"{self.doing} failed: another rank died or did not answer in time: {error}"
            self.leave(error)
            raise CheckpointError(text) from error

    def leave(self, error: BaseException) -> None:
        """Close the own group, so that ranks that wait for this one learn of it at once."""
        if self.group is not None and self.group in _own_groups.values():
            own, self.group, self.wrapper.group = self.group, None, None
            self.options.clear()
            _own_groups.clear()
            # Connections close with the last reference: where the error came by, there are some.
            traceback.clear_frames(error.__traceback__)
            dist.destroy_process_group(own)


def _own_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, with the timeout of the default group."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _own_groups:
        timeout = world._get_backend(world._device_types[0]).options._timeout
        _own_groups[world] = dist.new_group(backend="gloo", timeout=timeout)
    return _own_groups[world]


class _Save:
    """One save: its folder, and what is common to both ways of saving."""

    def __init__(
        self, folder: str | Path, step: int, keep: int | None, group: dist.ProcessGroup | None
    ) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"Expected a step of 0 or more, got {step!r}.")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"Expected keep to be None or 1 or more, got {keep!r}.")
        self.step = step
        self.ranks = _Ranks(f"Saving step {step} into {folder}", group)
        self.writer = StepWriter(Path(folder), step, keep)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of DCP's functions. Made anew, so that nothing here holds the group."""
        planner = DefaultSavePlanner(flatten_state_dict=False)
        return self.ranks.options | {"storage_writer": self.writer, "planner": planner}

    def end(self, future: "Future[Any]") -> None:
        """What follows an asynchronous save, in its thread, whether or not anybody waits."""
        self.writer.release()
        error = future.exception()
        if isinstance(error, RuntimeError):
            self.ranks.leave(error)

    def prepare(
        self, model: Model, optimizer: torch.optim.Optimizer | None, extra: Any
    ) -> dict[str, Any]:
        """Tensors to store, of this rank; the folder is ready for them."""
        tensors: dict[str, Any] = {}
        wrapper, modules = self.ranks.wrapper, _modules(model)
        is_alone = wrapper.get_world_size() == 1

        def local() -> RankState:
            view = None if optimizer is None else OptimizerView(optimizer, modules).value()
            value = {"model": saved_state(modules), "optimizer": view, "extra": extra or {}}
            return describe(value | {"step": self.step}, tensors, is_alone=is_alone)

        document: dict[str, Any] = {}  # on the coordinator

        def common(ranks: list[RankState]) -> dict[str, int]:
            tree, differing = merge(ranks, are_stages=_are_stages(model))
            document.update(tree, world_size=len(ranks), per_rank=list(differing))
            return differing

        with self.ranks.errors():
            differing = wrapper.all_reduce("describe", local, common)
            if not is_alone:
                self._compare_copies(tensors)
            wrapper.broadcast("begin", lambda: self.writer.begin(document))
        rename_differing(tensors, differing, wrapper.get_rank())
        return tensors

    def _compare_copies(self, tensors: dict[str, Any]) -> None:
        """Compare the bits of pieces that several ranks have; others are not even read."""
        wrapper, mine = self.ranks.wrapper, dict(local_pieces(tensors))
        shared = wrapper.all_reduce("pieces", lambda: list(mine), held_twice)

        def sums() -> dict[str, int]:
            return {name: checksum(t) for name, t in mine.items() if name in shared}

        if shared:
            wrapper.all_reduce("copies", sums, check_equal)
