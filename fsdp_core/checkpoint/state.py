"""Model and optimizer as checkpoints hold them: a tree of JSON, and tensors by name.

    model        {name: ...}
    optimizer    {"type": ..., "groups": [...], "state": {name: {key: ...}}}
    extra        what the caller gave

    tree             JSON
    tensor           {"$tensor": its name in DCP, "pieces": whether it knows its chunks}
    tuple            {"$tuple": [...]}
    dict             itself if its keys are words, else {"$items": [[key, value], ...]}

Tensors go to torch DCP, which cuts and joins them: those that know their chunks (`RowSharded`,
DTensor, `Piece`) piece by piece, plain ones once. Everything is called by parameter names. A model
is a list of modules: one, or a rank's stages, whose names are those of the whole model.

A `Piece` is what a rank has of a tensor that tensor, expert or row parallelism cuts:

    global [8, 6]   --tp cuts dim 0 in 2, this rank has the second-->   rows 4 to 7
                    --FSDP cuts those rows, this rank has the last-->   rows 6 and 7
    piece           offsets (6, 0), sizes (2, 6), of shape (8, 6)

A parameter that a library makes of several tensors, as of gate and up, is stored as these.

A plain tensor that is not the same on all ranks, as BatchNorm's statistics, is stored for each rank
under `rank<r>.<name>`, and once without. Pieces that several ranks have must be the same on all.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import WriteItem

from fsdp_core.fsdp.api import units_in
from fsdp_core.fsdp.row_sharded import RowSharded, write_items
from fsdp_core.parallel.tensor_parallel import Stretch, Stretches, named_stretches

# --- pieces -----------------------------------------------------------------------------------

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Parts of a name that torch.compile and checkpoint_wrapper put in."""

Stretched = Mapping[str, Stretches]
"""By the name of a parameter; one that is not in it is itself a global tensor."""


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def stretches_of(modules: Iterable[nn.Module]) -> Stretched:
    """What every parameter that is cut, or called otherwise, is made of, by its plain name."""
    return {
        plain_name(name): tuple(replace(each, name=plain_name(each.name)) for each in stretches)
        for module in modules
        for name, stretches in named_stretches(module).items()
        if stretches != (Stretch(name),)
    }


def global_parts(name: str, value: Any, stretched: Stretched) -> dict[str, Any]:
    """A parameter, or a state of its shape, by names of global tensors; as it is if not cut."""
    if name not in stretched:
        return {name: value}
    return {each.name: Piece.of(value, each) for each in stretched[name]}


def global_names(name: str, stretched: Stretched) -> list[str]:
    """The names of `global_parts`."""
    return [each.name for each in stretched[name]] if name in stretched else [name]


class Piece(torch.Tensor):
    """A rank's part of a global tensor, plain or sharded by rows: what DCP asks of a tensor. Of the
    global shape, and without operators: a `stretch` of `part`, a parameter or its rows here.
    """

    part: torch.Tensor
    stretch: Stretch

    @classmethod
    def of(cls, part: torch.Tensor, stretch: Stretch) -> "Piece":
        sizes = list(part.shape)
        if stretch.length is not None:
            sizes[stretch.dim] = stretch.length
        for cut in stretch.cuts:
            sizes[cut.dim] *= cut.axis_size
        self: Piece = torch.Tensor._make_wrapper_subclass(
            cls, tuple(sizes), dtype=part.dtype, device=part.device
        )
        self.part, self.stretch = part.detach(), stretch
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"Expected nothing to compute with a Piece, got {func}.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Piece({self.part!r}, {self.stretch})"

    @property
    def local(self) -> torch.Tensor:
        return self._rows()[1]

    def _rows(self) -> tuple[int, torch.Tensor]:
        """The first row of the stretch that this rank has, and all of those that it has."""
        part, stretch, first = self.part, self.stretch, 0
        local = part
        if isinstance(part, RowSharded):
            local, first = part.to_local(), part.row_spec.row_start
        if stretch.length is None:
            return first, local
        if stretch.dim:
            return first, local.narrow(stretch.dim, stretch.start, stretch.length)
        low = max(first, stretch.start)
        high = max(low, min(first + local.shape[0], stretch.start + stretch.length))
        inside = min(low - first, local.shape[0])
        return low - stretch.start, local.narrow(0, inside, high - low)

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        """Where it lies in the global tensor, if this rank has any of it."""
        first, local = self._rows()
        if not local.numel():
            return []
        offsets, sizes = [0] * local.dim(), list(self.shape)
        for cut in self.stretch.cuts:
            sizes[cut.dim] //= cut.axis_size
            offsets[cut.dim] += cut.index * sizes[cut.dim]
        offsets[0] += first
        return [metadata.ChunkStorageMetadata(torch.Size(offsets), local.shape)]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        return write_items(fqn, self, self.local)

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self.local


def has_pieces(tensor: Any) -> bool:
    """Whether a tensor tells DCP which pieces of it this rank has."""
    return hasattr(tensor, "__create_chunk_list__")


def is_here(tensor: Any) -> bool:
    """Whether this rank has any of a tensor: optimizers keep no state of what has no rows here."""
    return not has_pieces(tensor) or bool(tensor.__create_chunk_list__())


def local_pieces(tensors: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's memory of every tensor that has pieces, with a name of tensor and place."""
    for key, tensor in tensors.items():
        for chunk in tensor.__create_chunk_list__() if has_pieces(tensor) else ():
            place = ", ".join(map(str, chunk.offsets))
            yield f"{key}[{place}]", tensor.__get_tensor_shard__(None)


Modules = Sequence[nn.Module]
"""A model: one module, or stages."""
SINGLE_STATES = {"step", "eta", "mu", "mu_product"}
"""States of torch's optimizers that are one number even beside a 0-d parameter."""


def encode(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    """`value` as JSON; its tensors go into `tensors`, named by their path (`ValueError`: it holds
    something else than JSON's values, tensors, tuples and dicts of those, or two of its paths are
    the same).
    """
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise ValueError(f"Expected one tensor of the name {path}, got two.")
        if value.is_meta:
            raise ValueError(f"Expected {path} in memory, got a meta tensor.")
        tensors[path] = value if isinstance(value, Piece) else value.detach()
        return {"$tensor": path, "pieces": has_pieces(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(v, f"{path}.{key}", tensors) for key, v in value.items()}
        pairs = [[encode(k, path, {}), encode(v, f"{path}.{k}", tensors)] for k, v in value.items()]
        return {"$items": pairs}
    if type(value) in (list, tuple):
        parts = [encode(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return parts if isinstance(value, list) else {"$tuple": parts}
    raise ValueError(
        f"Expected numbers, strings, tensors, lists, tuples and dicts in {path}, got a "
        f"{type(value).__name__}."
    )


def decode(tree: Any, make: Callable[[dict[str, Any]], torch.Tensor]) -> Any:
    """The value of a tree; `make` gives a tensor for each `$tensor`."""
    if isinstance(tree, list):
        return [decode(part, make) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return make(tree)
    if "$tuple" in tree:
        return tuple(decode(part, make) for part in tree["$tuple"])
    if "$items" in tree:
        return {decode(k, make): decode(v, make) for k, v in tree["$items"]}
    return {key: decode(part, make) for key, part in tree.items()}


def fsdp_groups(modules: Modules) -> list[Any]:
    """Parameter groups of all units in a model, each once."""
    return [group for unit in units_in(*modules) for group in unit.groups]


def model_state(modules: Modules) -> dict[str, Any]:
    """The state_dict, of parameters at rest even where gathered (`ValueError`: a name twice)."""
    at_rest = {
        id(gathered): parameter
        for group in fsdp_groups(modules)
        for gathered, parameter in zip(group.unsharded, group.sharded, strict=True)
    }
    found: dict[str, Any] = {}
    for module in modules:
        for key, value in module.state_dict(keep_vars=True).items():
            name = plain_name(key)
            if name in found:
                raise ValueError(
                    f"Expected names that differ, over all stages and without wrappers' parts, got "
                    f"{name} twice."
                )
            found[name] = at_rest.get(id(value), value)
    return found


def saved_state(modules: Modules) -> dict[str, Any]:
    """`model_state` by global names, what is cut as pieces (`ValueError`: one twice)."""
    stretched, found = stretches_of(modules), dict[str, Any]()
    for name, value in model_state(modules).items():
        parts = global_parts(name, value, stretched)
        if twice := found.keys() & parts.keys():
            raise ValueError(f"Expected one parameter of the global {min(twice)}, got two.")
        found |= parts
    return found


def _parameter_names(modules: Modules) -> dict[int, str]:
    """First name of each parameter at rest, by identity."""
    state = model_state(modules)
    found: dict[int, str] = {}
    for module in modules:
        for raw, _ in module.named_parameters(remove_duplicate=False):
            name = plain_name(raw)
            if name in state:
                found.setdefault(id(state[name]), name)
    return found


class OptimizerView:
    """An optimizer by names of parameters (`ValueError`: one that is not of the model at rest)."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Modules) -> None:
        self.optimizer, self.modules = optimizer, modules
        known = _parameter_names(modules)
        self.parameters: list[Any] = [p for g in optimizer.param_groups for p in g["params"]]
        if not all(id(p) in known for p in self.parameters):
            raise ValueError(
                "Expected an optimizer over parameters of this model at rest, got others: build it "
                "after fully_shard, and not while units are gathered."
            )
        self.names = [known[id(p)] for p in self.parameters]
        dumped = optimizer.state_dict()
        self.state: dict[int, dict[str, Any]] = dumped["state"]
        self.groups: list[dict[str, Any]] = dumped["param_groups"]
        if not all(isinstance(index, int) for index in self.state):
            raise ValueError(f"Expected states of parameters only, got keys {list(self.state)}.")

    def value(self) -> dict[str, Any]:
        """What a checkpoint holds of it, as far as this rank knows."""
        stretched = stretches_of(self.modules)
        groups = []
        for group in self.groups:
            own = [self.names[index] for index in group["params"]]
            names = [each for name in own for each in global_names(name, stretched)]
            plain = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({"params": names, "values": plain})
        state: dict[str, Any] = {}
        for index, states in self.state.items():
            if is_here(self.parameters[index]):
                state |= self._pieces(index, states, stretched)
        return {"type": type(self.optimizer).__name__, "groups": groups, "state": state}

    def _pieces(
        self, index: int, states: dict[str, Any], stretched: Stretched
    ) -> dict[str, dict[str, Any]]:
        name, parameter = self.names[index], self.parameters[index]
        parts = global_parts(name, parameter, stretched)
        if name not in stretched:
            return {name: states}
        found: dict[str, dict[str, Any]] = {each: {} for each in parts if is_here(parts[each])}
        for key, value in states.items():
            is_single = not isinstance(value, torch.Tensor) or key in SINGLE_STATES
            if is_single or (value.shape != parameter.shape and not value.dim()):
                cut = dict.fromkeys(found, value)
            elif value.shape == parameter.shape:
                cut = global_parts(name, value, stretched)
            else:
                raise ValueError(
                    f"Expected states of {name}, which is cut over ranks or made of several "
                    f"tensors, of its shape {tuple(parameter.shape)}, got {key} of "
                    f"{tuple(value.shape)}: no other layout could take it."
                )
            for each, own in found.items():
                own[key] = cut[each]
        return found

    @property
    def is_torchs(self) -> bool:
        return type(self.optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict

    def load(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer a state of this layout, without change of dtype or of memory."""
        optimizer, before = self.optimizer, self.optimizer.param_groups
        optimizer.load_state_dict(state_dict)
        for old, new in zip(before, optimizer.param_groups, strict=True):
            for key, value in old.items():
                # Graphs read a learning rate that is a tensor where it is.
                if isinstance(value, torch.Tensor) and isinstance(new.get(key), torch.Tensor):
                    new[key] = value.copy_(new[key])
        if not self.is_torchs:
            return
        for index, states in state_dict["state"].items():
            found = optimizer.state[self.parameters[index]]
            for key, value in states.items():
                # torch casts states to their parameter's dtype.
                now = found.get(key)
                if isinstance(value, torch.Tensor) and torch.is_tensor(now):
                    found[key] = now if now.dtype == value.dtype else value.to(now.device)


# --- saving -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankState:
    """One rank's tree, and checksums of its plain tensors by name."""

    tree: dict[str, Any]
    sums: dict[str, int]


def describe(value: dict[str, Any], tensors: dict[str, Any], *, is_alone: bool) -> RankState:
    """`value` as a tree; fills `tensors`. A rank that is alone needs no checksums."""
    tree = {key: encode(part, key, tensors) for key, part in value.items()}
    plain = {} if is_alone else {k: t for k, t in tensors.items() if not has_pieces(t)}
    return RankState(tree, {key: checksum(tensor) for key, tensor in plain.items()})


def checksum(tensor: torch.Tensor) -> int:
    """Of dtype, shape and bytes."""
    shape = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    flat: Any = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(flat, zlib.crc32(shape))


def merge(
    ranks: list[RankState], *, are_stages: bool = False
) -> tuple[dict[str, Any], dict[str, int]]:
    """One tree of all ranks, and the plain tensors that differ, each with its first rank. If
    `are_stages`, ranks may have other parts of the model. Raises `ValueError` where ranks differ in
    anything but that some have no rows of a parameter.
    """
    first = ranks[0].tree
    if are_stages:
        model: dict[str, Any] = {}
        for number, rank in enumerate(ranks):
            for name, entry in rank.tree["model"].items():
                _check_same(name, number, model.setdefault(name, entry), entry)
        ranks = [RankState(rank.tree | {"model": model}, rank.sums) for rank in ranks]
        first = ranks[0].tree
    for number, rank in enumerate(ranks[1:], start=1):
        for part in first.keys() | rank.tree.keys():
            if part != "optimizer" or not (first[part] and rank.tree[part]):
                _check_same(part, number, first.get(part), rank.tree.get(part))
    sums: dict[str, tuple[int, int]] = {}
    differing = {}
    for number, rank in enumerate(ranks):
        for key, value in rank.sums.items():
            owner, expected = sums.setdefault(key, (number, value))
            if value != expected:
                differing[key] = owner
    if not first["optimizer"]:
        return first, differing
    return first | {"optimizer": _merge_optimizers([r.tree["optimizer"] for r in ranks])}, differing


def _merge_optimizers(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    groups = [g | {"params": dict.fromkeys(g["params"])} for g in ranks[0]["groups"]]
    state: dict[str, Any] = {}
    for number, rank in enumerate(ranks):
        _check_same("optimizer's type", number, ranks[0]["type"], rank["type"])
        _check_same("number of groups", number, len(groups), len(rank["groups"]))
        for group, other in zip(groups, rank["groups"], strict=True):
            _check_same("optimizer's groups", number, group["values"], other["values"])
            group["params"].update(dict.fromkeys(other["params"]))
        for name, states in rank["state"].items():
            _check_same(f"states of {name}", number, state.setdefault(name, states), states)
    lists = [group | {"params": list(group["params"])} for group in groups]
    return {"type": ranks[0]["type"], "groups": lists, "state": state}


def _check_same(what: str, rank: int, expected: Any, got: Any) -> None:
    a, b = json.dumps(expected, sort_keys=True), json.dumps(got, sort_keys=True)
    if a != b:
        raise ValueError(
            f"Expected the same {what} on all ranks, got on rank {rank} {b[:200]}, not {a[:200]}."
        )


def rename_differing(
    tensors: dict[str, torch.Tensor], differing: dict[str, int], rank: int
) -> None:
    """Give plain tensors that ranks do not agree on a name for each rank."""
    for key in tensors.keys() & differing.keys():
        tensors[f"rank{rank}.{key}"] = tensors[key]
        if rank != differing[key]:
            del tensors[key]


def check_equal(ranks: list[dict[str, int]]) -> None:
    """Compare checksums of pieces that several ranks have (`ValueError`: one differs)."""
    owners: dict[str, tuple[int, int]] = {}
    for number, rank in enumerate(ranks):
        for key, value in rank.items():
            owner, expected = owners.setdefault(key, (number, value))
            if value != expected:
                raise ValueError(
                    f"Expected the same {key} on all ranks that have it, got other bits on rank "
                    f"{number} than on rank {owner}: copies have drifted apart."
                )


def held_twice(ranks: list[list[str]]) -> set[str]:
    """Names of pieces that more than one rank has."""
    counts = Counter(name for rank in ranks for name in set(rank))
    return {name for name, count in counts.items() if count > 1}
