"""Where the tensors of a checkpoint go: into which memory of a model and an optimizer."""

import warnings
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fsdp_core.checkpoint.pieces import (
    Piece,
    Stretched,
    global_names,
    global_parts,
    has_pieces,
    is_here,
    plain_name,
    stretches_of,
)
from fsdp_core.checkpoint.state import (
    SINGLE_STATES,
    Modules,
    OptimizerView,
    decode,
    model_state,
    saved_state,
)

_HOW_NOT_WHAT = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Entries of a parameter group that stay as the optimizer was built: they change no formula."""


class Fit:
    """Which stored tensor goes into which memory of a model and an optimizer.

    `choose` checks that everything fits and fills `targets`; once those are read, `apply` hands
    them to the model and the optimizer.
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
        self,
        metadata: Metadata,
        modules: Modules,
        optimizer: torch.optim.Optimizer | None,
        *,
        are_stages: bool = False,
    ) -> set[str]:
        """Fill `targets`.

        Args:
            are_stages: the model may be a part of the one that was saved; see `check_complete`.

        Returns:
            Global names of this rank's parameters and buffers.

        Raises:
            ValueError: names, shapes, dtypes or the optimizer's type differ.
        """
        self._stored, self._stretched = metadata.state_dict_metadata, stretches_of(modules)
        names = self._choose_model(modules, are_stages=are_stages)
        if optimizer is not None:
            self._choose_optimizer(OptimizerView(optimizer, modules))
        self.extra = decode(self._document["extra"], self._make)
        return names

    def apply(self) -> None:
        """Hand over what was read."""
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
        """Enter a target for a state.

        Args:
            what: global name, and key of the state.
            part: the parameter, or the piece of a global tensor that is looked at.
            like: the state of the parameter as it is; None if there is none.
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
    """Compare the names in a checkpoint with those of all ranks together.

    Raises:
        ValueError: no rank has what the checkpoint holds.
    """
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
