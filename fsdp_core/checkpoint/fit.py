"""Where the tensors of a checkpoint go: into which memory of a model and an optimizer."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fsdp_core.checkpoint.state import (
    OptimizerView,
    decode,
    has_pieces,
    is_here,
    model_state,
    plain_name,
)

_SCALAR_STATES = {"step", "eta", "mu", "mu_product"}
"""States of torch's optimizers that are one number even beside a 0-d parameter."""
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
        self._apply: list[Callable[[], Any]] = []
        self.targets: dict[str, torch.Tensor] = {}
        self.extra: Any = None

    def choose(
        self, metadata: Metadata, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Fill `targets`.

        Raises:
            ValueError: names, shapes, dtypes or the optimizer's type differ.
        """
        self._stored = metadata.state_dict_metadata
        self._choose_model(model)
        if optimizer is not None:
            self._choose_optimizer(OptimizerView(optimizer, model))
        self.extra = decode(self._document["extra"], self._make)

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

    def _choose_model(self, model: nn.Module) -> None:
        tree, state = self._document["model"], model_state(model)
        _check_names("parameters and buffers", state.keys(), tree.keys())
        self._parameters = {f"model.{n}" for n, v in state.items() if isinstance(v, nn.Parameter)}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not name.endswith(_EXTRA_STATE_KEY_SUFFIX):
                self._check_tensor(name, value, tree[name])
        found = {
            name: decode(tree[name], partial(self._make, like=_memory(value, tree[name])))
            for name, value in state.items()
        }
        raw = {plain_name(key): key for key in model.state_dict()}
        loaded = {raw[name]: value for name, value in found.items()}
        self._apply.append(partial(model.load_state_dict, loaded))

    def _check_tensor(self, name: str, value: torch.Tensor, entry: Any) -> None:
        stored = self._stored[entry["$tensor"]]
        expected, got = (value.dtype, value.shape), (stored.properties.dtype, stored.size)
        if value.is_meta:
            raise ValueError(f"Expected {name} in memory, got a meta tensor: call to_empty first.")
        if expected != got:
            raise ValueError(f"Expected {name} of {_text(expected)}, got {_text(got)}.")

    def _choose_optimizer(self, view: OptimizerView) -> None:
        parameters = model_state(view.model)
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
            names = [view.names[i] for i in group["params"]]
            # Who builds an optimizer may leave out what has no rows on this rank.
            needed = [n for n in stored["params"] if n in names or is_here(parameters[n])]
            _check_names(f"parameters in group {number}", names, needed)
            values = decode(stored["values"], self._make)
            kept = {k: v for k, v in group.items() if k in _HOW_NOT_WHAT}
            groups.append(group | values | kept)
        state: dict[int, Any] = {}
        for index, name in enumerate(view.names):
            if not is_here(view.parameters[index]):
                # What an optimizer keeps of parameters without rows here is nobody's: it stays.
                state |= {i: view.state[i] for i in (index,) if i in view.state}
            elif name in saved["state"]:
                state[index] = self._choose_states(view, index, saved["state"][name])
        self._apply.append(partial(view.load, {"state": state, "param_groups": groups}))

    def _choose_states(self, view: OptimizerView, index: int, tree: Any) -> dict[str, Any]:
        name, parameter, now = view.names[index], view.parameters[index], view.state.get(index, {})
        if now:
            _check_names(f"states of {name}", now.keys(), tree.keys())
        was_cut = self._document["model"][name]["pieces"]

        def make(key: str, entry: dict[str, Any]) -> torch.Tensor:
            stored, like = self._stored[entry["$tensor"]], now.get(key)
            alike = not was_cut and stored.size == parameter.shape and key not in _SCALAR_STATES
            if not (entry["pieces"] or alike):
                return self._make(entry, None if has_pieces(like) else like)
            if stored.size != parameter.shape:
                raise ValueError(
                    f"Expected {key} of {name} of {tuple(parameter.shape)}, got "
                    f"{tuple(stored.size)}."
                )
            dtype = stored.properties.dtype
            if has_pieces(like) != has_pieces(parameter) or getattr(like, "dtype", None) != dtype:
                like = torch.empty_like(parameter.detach(), dtype=dtype)
            return self._make(entry, like)

        return {key: decode(part, partial(make, key)) for key, part in tree.items()}


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
