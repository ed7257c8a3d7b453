"""Save and load model and optimizer through torch Distributed Checkpoint, bit for bit.

    save(folder, 10, model, optimizer, {"tokens": 5})   all ranks; returns when complete
    latest(folder)                                      10
    loaded = load(folder, model, optimizer)             all ranks; any world, any strategy

Main weights, buffers, optimizer states and hyperparameters, and `extra`; no gradients, no random
numbers. Tensors are called by parameter names and hold true row offsets, so what is loaded may have
other ranks, strategies or units, or none; `torch.distributed.checkpoint.load` reads the folders,
too, under `model.<name>` and `optimizer.state.<name>.<key>`.

What modules say is cut over an axis, tensor or expert parallel, is stored as the tensor of the
model that is not cut. Copies of a piece that ranks share are compared, so a save of ranks that have
drifted apart fails. Modules of another library have the same names (`parallel.tensor_parallel`),
and states of their own, such as scales of eight-bit numbers: who has none takes none, and who finds
none keeps what it has and warns.

`files` says why a crash harms no complete checkpoint, `state` what is stored. Ranks talk over a
gloo group of their own. What fails on one rank raises on all of them.
"""

import contextlib
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fsdp_core.checkpoint.files import (
    CheckpointError,
    StepWriter,
    check_files,
    complete_steps,
    find_step,
    read_document,
)
from fsdp_core.checkpoint.state import (
    SINGLE_STATES,
    Modules,
    OptimizerView,
    Piece,
    RankState,
    Stretched,
    check_equal,
    checksum,
    decode,
    describe,
    fsdp_groups,
    global_names,
    global_parts,
    has_pieces,
    held_twice,
    is_here,
    local_pieces,
    merge,
    model_state,
    plain_name,
    rename_differing,
    saved_state,
    stretches_of,
)
from fsdp_core.fsdp.api import units_in
from fsdp_core.parallel.mesh import world_timeout

_HOW_NOT_WHAT = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Entries of a parameter group that stay as the optimizer was built: they change no formula."""


class Fit:
    """Which stored tensor goes into which memory of a model and an optimizer. `choose` checks that
    everything fits and fills `targets`; once those are read, `apply` hands them to the model and
    the optimizer.
    """

    def __init__(self, document: dict[str, Any], rank: int, world_size: int) -> None:
        self._document = document
        self._own = f"rank{rank}." if world_size == document["world_size"] else None
        self._per_rank = set(document["per_rank"])
        self._stored: dict[str, Any] = {}
        self._parameters: set[str] = set()
        self._stretched: Stretched = {}
        self._apply: list[Callable[[], Any]] = []
        self.targets: dict[str, Any] = {}
        self.extra: Any = None

    def choose(
        self, metadata: Metadata, modules: Modules, optimizer: torch.optim.Optimizer | None, *,
        are_stages: bool,
    ) -> set[str]:  # fmt: skip
        """Fill `targets`; global names of this rank's parameters and buffers. If `are_stages`, the
        model may be a part of the one that was saved; see `check_complete`. Raises `ValueError`
        where names, shapes, dtypes or the optimizer's type differ.
        """
        self._stored, self._stretched = metadata.state_dict_metadata, stretches_of(modules)
        names = self._choose_model(modules, are_stages=are_stages)
        if optimizer is not None:
            self._choose_optimizer(OptimizerView(optimizer, modules))
        self.extra = decode(self._document["extra"], self._make)
        return names

    def apply(self) -> None:
        for step in self._apply:
            step()

    def _make(self, entry: dict[str, Any], like: torch.Tensor | None = None) -> torch.Tensor:
        """Enter a target: `like` itself if it is of the stored shape and dtype, else new memory."""
        key = entry["$tensor"]
        if key in self._per_rank:
            key = self._key_of_rank(key)
        stored = self._stored[key]
        dtype, size = stored.properties.dtype, stored.size
        if like is None or (like.dtype, like.shape) != (dtype, size):
            like = torch.empty(size, dtype=dtype)
        self.targets[key] = like
        return like

    def _key_of_rank(self, key: str) -> str:
        if self._own is not None and self._own + key in self._stored:
            return self._own + key
        if not key.startswith("model.") or key in self._parameters:
            raise ValueError(
                f"Expected the {self._document['world_size']} ranks that saved, as {key} differed "
                "between them, got others."
            )
        warnings.warn(
            f"{key} differed between the ranks that saved: taking the first's.", stacklevel=2
        )
        return key

    def _choose_model(self, modules: Modules, *, are_stages: bool) -> set[str]:
        tree, state, parts = self._document["model"], model_state(modules), saved_state(modules)
        saved = tree.keys() & parts.keys() if are_stages else tree.keys()
        _check_names("parameters and buffers", _needed(parts, tree), _needed(saved, parts))
        if fresh := sorted(parts.keys() - tree.keys()):
            warnings.warn(
                f"The checkpoint is of other modules and has no {_some(fresh)}: these stay as they "
                "are.",
                stacklevel=2,
            )
        self._parameters = {
            f"model.{each}"
            for name, value in state.items()
            if isinstance(value, nn.Parameter)
            for each in global_names(name, self._stretched)
        }
        for name, value in parts.items():
            if (
                name not in fresh
                and isinstance(value, torch.Tensor)
                and not name.endswith(_EXTRA_STATE_KEY_SUFFIX)
            ):
                self._check_tensor(name, value, tree[name])
        found = {
            name: value if name in fresh else self._decoded(name, value, tree)
            for name, value in state.items()
        }
        for module in modules:
            loaded = {raw: found[plain_name(raw)] for raw in module.state_dict()}
            self._apply.append(partial(module.load_state_dict, loaded))
        return set(parts)

    def _decoded(self, name: str, value: Any, tree: dict[str, Any]) -> Any:
        if name not in self._stretched:
            make = partial(self._make, like=_memory(value, tree[name]))
            return decode(tree[name], make)
        for each, piece in global_parts(name, value, self._stretched).items():
            self._make(tree[each], piece)
        return value.detach()

    def _check_tensor(self, name: str, value: torch.Tensor, entry: Any) -> None:
        stored = self._stored[entry["$tensor"]]
        expected, got = (value.dtype, value.shape), (stored.properties.dtype, stored.size)
        if value.is_meta:
            raise ValueError(f"Expected {name} in memory, got a meta tensor: call to_empty first.")
        if expected != got:
            raise ValueError(f"Expected {name} of {_text(expected)}, got {_text(got)}.")

    def _choose_optimizer(self, view: OptimizerView) -> None:
        parameters = saved_state(view.modules)
        saved = self._document["optimizer"]
        if saved is None:
            raise ValueError("Expected an optimizer's state, got a checkpoint saved without.")
        kind = type(view.optimizer).__name__
        if (kind, len(view.groups)) != (saved["type"], len(saved["groups"])):
            raise ValueError(
                f"Expected {kind} with {len(view.groups)} parameter groups, got {saved['type']} "
                f"with {len(saved['groups'])}."
            )
        groups = []
        for number, (group, stored) in enumerate(zip(view.groups, saved["groups"], strict=True)):
            own = [view.names[i] for i in group["params"]]
            names = [each for name in own for each in global_names(name, self._stretched)]
            # Who builds an optimizer may leave out what has no rows on this rank.
            mine = [n for n in stored["params"] if n in parameters]
            needed = [n for n in mine if n in names or is_here(parameters[n])]
            _check_names(f"parameters in group {number}", names, needed)
            values = decode(stored["values"], self._make)
            kept = {k: v for k, v in group.items() if k in _HOW_NOT_WHAT}
            groups.append(group | values | kept)
        state: dict[int, Any] = {}
        for index in range(len(view.names)):
            if not view.is_torchs and not is_here(view.parameters[index]):
                # Kernels of libraries keep nothing of parameters without rows here.
                state |= {i: view.state[i] for i in (index,) if i in view.state}
            elif states := self._choose_states(view, index, saved["state"]):
                state[index] = states
        self._apply.append(partial(view.load, {"state": state, "param_groups": groups}))

    def _choose_states(self, view: OptimizerView, index: int, saved: Any) -> dict[str, Any]:
        """The states of a parameter, of all tensors that it is made of; none if none were saved."""
        name, parameter, now = view.names[index], view.parameters[index], view.state.get(index, {})
        parts = global_parts(name, parameter, self._stretched)
        made: dict[str, Any] = {}
        for each, part in parts.items():
            if each not in saved:
                continue
            if before := now or made:
                _check_names(f"states of {each}", before.keys(), saved[each].keys())
            for key, tree in saved[each].items():
                make = partial(self._make_state, (each, key), parameter, part)
                like = made.get(key, now.get(key))
                made[key] = decode(tree, partial(make, like))
        return made

    def _make_state(
        self, what: tuple[str, str], parameter: Any, part: Any, like: Any, entry: dict[str, Any]
    ) -> torch.Tensor:
        """Enter a target for a state `like`, or None, of the parameter or of its piece `part`.
        `what` is the global name and the state's key.
        """
        name, key = what
        stored, was_cut = self._stored[entry["$tensor"]], self._document["model"][name]["pieces"]
        alike = not was_cut and stored.size == part.shape and key not in SINGLE_STATES
        if not (entry["pieces"] or alike):
            return self._make(entry, None if has_pieces(like) else like)
        if stored.size != part.shape:
            raise ValueError(
                f"Expected {key} of {name} of {tuple(part.shape)}, got {tuple(stored.size)}."
            )
        dtype = stored.properties.dtype
        if has_pieces(like) != has_pieces(parameter) or getattr(like, "dtype", None) != dtype:
            like = torch.empty_like(parameter.detach(), dtype=dtype)
        assert isinstance(like, torch.Tensor)
        self._make(entry, Piece.of(like, part.stretch) if isinstance(part, Piece) else like)
        return like


def check_complete(saved: Collection[str], ranks: Sequence[set[str]]) -> None:
    """Refuse (`ValueError`) a checkpoint that holds what no rank has, or the other way round."""
    found = set().union(*ranks)
    _check_names(
        "parameters and buffers over all stages", _needed(found, saved), _needed(saved, found)
    )


def _needed(names: Iterable[str], others: Container[str]) -> list[str]:
    """Without what modules of one library alone keep, such as scales of eight-bit numbers."""
    return [n for n in names if n in others or not n.endswith(_EXTRA_STATE_KEY_SUFFIX)]


def _memory(value: Any, tree: Any) -> torch.Tensor | None:
    alike = isinstance(value, torch.Tensor) and isinstance(tree, dict) and "$tensor" in tree
    return value.detach() if alike else None


def _text(kind: tuple[torch.dtype, torch.Size]) -> str:
    return f"{kind[0]} {tuple(kind[1])}"


def _check_names(what: str, expected: Iterable[str], got: Iterable[str]) -> None:
    missing, unexpected = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"Expected the same {what}, got a checkpoint without {_some(missing)} and with "
            f"{_some(unexpected)} besides."
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5]) or 'nothing'}{more}"


_own_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]
_own_groups = weakref.WeakKeyDictionary()

Model = nn.Module | Sequence[nn.Module]
"""A model, or the stages that this rank has of one, in a list."""


@dataclass(frozen=True)
class Loaded:
    """What was loaded beside model and optimizer: the step, `extra` as saved, the checkpoint."""

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
) -> Path:
    """Save as `folder/step-<step>`, on the disk when this returns. A collective.

    folder: shared by all ranks.
    step: not saved before.
    model: with FSDP units or without; units may be gathered. A list: stages, whose names are those
        of the whole model, so that ranks have other names.
    optimizer: over the model's parameters.
    extra: JSON values, tuples and tensors; the same on all ranks, but for what is in tensors.
    Raises ValueError: the step is negative or exists; something that cannot be stored; copies of
        one piece differ between ranks.
    Raises CheckpointError: a rank failed or died. Complete checkpoints are as before.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"Expected a step of 0 or more, got {step!r}.")
    ranks = _Ranks(f"Saving step {step} into {folder}")
    wrapper, modules = ranks.wrapper, _modules(model)
    is_alone = wrapper.get_world_size() == 1
    writer, tensors = StepWriter(Path(folder), step), dict[str, Any]()
    document: dict[str, Any] = {}  # on the coordinator

    def local() -> RankState:
        view = None if optimizer is None else OptimizerView(optimizer, modules).value()
        value = {"model": saved_state(modules), "optimizer": view, "extra": extra or {}}
        return describe(value | {"step": step}, tensors, is_alone=is_alone)

    def common(states: list[RankState]) -> dict[str, int]:
        tree, differing = merge(states, are_stages=not isinstance(model, nn.Module))
        document.update(tree, world_size=len(states), per_rank=list(differing))
        return differing

    with ranks.errors():
        differing = wrapper.all_reduce("describe", local, common)
        if not is_alone:
            _compare_copies(wrapper, tensors)
        wrapper.broadcast("begin", lambda: writer.begin(document))
        rename_differing(tensors, differing, wrapper.get_rank())
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(tensors, storage_writer=writer, planner=planner, **ranks.options)
    return writer.complete_path


def _compare_copies(wrapper: _DistWrapper, tensors: dict[str, Any]) -> None:
    """Compare the bits of pieces that several ranks have; others are not even read."""
    mine = dict(local_pieces(tensors))
    shared = wrapper.all_reduce("pieces", lambda: list(mine), held_twice)

    def sums() -> dict[str, int]:
        return {name: checksum(t) for name, t in mine.items() if name in shared}

    if shared:
        wrapper.all_reduce("copies", sums, check_equal)


def load(
    folder: str | Path,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
) -> Loaded:
    """Load the checkpoint of `step`, or the latest, into model and optimizer. A collective.

    All is checked before anything is changed: that names, shapes and dtypes fit, and that every
    file holds the bytes that were written. Tensors are loaded in place where they are, gathered
    units are released, and copies of weights follow. How an optimizer computes (`foreach`, `fused`,
    `capturable`, `differentiable`) stays as it was built, all other hyperparameters are loaded.

    Raises ValueError: no such checkpoint, or it does not fit the model or the optimizer.
    Raises CheckpointError: missing or damaged files; or a rank failed or died, which may leave the
        model half loaded if it was while reading.
    """
    ranks = _Ranks(f"Loading from {folder}")
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
        for unit in units_in(*modules):
            unit.reshard()
        reader = dcp.FileSystemReader(path)
        are_stages = not isinstance(model, nn.Module)
        found = wrapper.all_gather(
            "fit",
            lambda: fit.choose(reader.read_metadata(), modules, optimizer, are_stages=are_stages),
        )
        check_complete(checked[0]["model"], found)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(fit.targets, storage_reader=reader, planner=planner, **ranks.options)
        wrapper.all_gather("apply", fit.apply)
    with torch.no_grad():
        for parameters in fsdp_groups(modules):
            parameters.main_weight_changed()
    return Loaded(checked[0]["step"], fit.extra, path)


def _modules(model: Model) -> Modules:
    return [model] if isinstance(model, nn.Module) else list(model)


class _Ranks:
    def __init__(self, doing: str) -> None:
        self.doing = doing
        in_use = dist.is_initialized()
        if not in_use:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        self.group = _own_group() if in_use else None
        self.wrapper = _DistWrapper(self.group, in_use, 0)
        self.options: dict[str, Any] = {"process_group": self.group, "no_dist": not in_use}

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
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
        if self.group is not None:
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
        _own_groups[world] = dist.new_group(backend="gloo", timeout=world_timeout())
    return _own_groups[world]
