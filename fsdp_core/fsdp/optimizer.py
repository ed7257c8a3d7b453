"""What must happen around the step of an optimizer over sharded parameters.

    before  an optimizer that would not train what the modules hold at rest is refused; one whose
            kernels take addresses is given this rank's rows, if it cannot find them itself
    after   copies of the main weights follow, once a group, inside a graph capture as well

Every `torch.optim.Optimizer` runs hooks that are registered once for the process, so nobody has to
say which optimizers there are. Version counters would not do for the copies: an optimizer may write
by a kernel of its own (TransformerEngine's FusedAdam does).
"""

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_core.fsdp.row_sharded import RowSharded

if TYPE_CHECKING:
    from fsdp_core.fsdp.param_group import ParamGroup

_SOURCE = "the ones from before fully_shard"
_WHOLE = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon)


class Tie(NamedTuple):
    """Parameter `number` of a group, or a stand-in of it; what it is when modules hold another."""

    group: "weakref.ref[ParamGroup]"
    number: int
    otherwise: str


_STAND_INS: Any = WeakIdKeyDictionary()
"""Ties of parameters that modules hold, or held, in place of those at rest."""

_STEPPED: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()
"""Optimizers that have been here: an SGD never has any state to tell by."""


def watch(group: "ParamGroup", sources: Sequence[nn.Parameter] = ()) -> None:
    """Tell `group`, which is not kept alive, of every step of an optimizer of its parameters.

    Optimizers that have others in the place of those at rest are refused: the gathered ones,
    `sources`, which were there before, and, when called again, those that have been replaced.
    """
    _register_hooks()
    ref = weakref.ref(group)
    for number, sharded in enumerate(group.sharded):
        sharded.tie = Tie(ref, number, "the ones from before to_empty() or to()")  # type: ignore[attr-defined]
    for otherwise, stand_ins in ((_SOURCE, sources), ("gathered ones", group.unsharded)):
        for number, parameter in enumerate(stand_ins):
            _STAND_INS[parameter] = Tie(ref, number, otherwise)


@functools.cache
def _register_hooks() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse what would not train rightly.

    Raises:
        RuntimeError: the optimizer has parameters that modules do not hold at rest.
        NotImplementedError: it needs whole tensors, or is used in a way that plain rows cannot be.
    """
    _check_at_rest(optimizer)
    sharded = [p for p in _parameters(optimizer) if type(p) is RowSharded]
    if sharded and isinstance(optimizer, _WHOLE):
        raise NotImplementedError(
            "Expected an optimizer that treats each element alone, as AdamW does, got "
            f"{type(optimizer).__name__}, which needs whole tensors: ranks have rows of them."
        )
    if sharded and sharded[0].is_cuda and optimizer not in _STEPPED:
        # The states made in this step live for ever: in memory of their own, not in holes that
        # activations have left and will want again, whole.
        _STEPPED.add(optimizer)
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.empty_cache()
    if not sharded or not _takes_addresses(optimizer):
        return None
    if any(option is not None for option in (*args[1:], *kwargs.values())):
        # Gradients of a closure would come too late, and a GradScaler would see this rank's only.
        raise NotImplementedError(
            f"Expected step() of {type(optimizer).__name__} over sharded parameters to have no "
            "closure and no grad_scaler."
        )
    return (_on_rows(optimizer, sharded),), {}


def _check_at_rest(optimizer: torch.optim.Optimizer) -> None:
    wrong: dict[str, list[str]] = {}
    for parameter in _parameters(optimizer):
        is_sharded = type(parameter) is RowSharded
        tie: Tie | None = parameter.tie if is_sharded else _STAND_INS.get(parameter)
        group = tie.group() if tie is not None else None
        if tie is None or group is None or group.sharded[tie.number] is parameter:
            continue
        if tie.otherwise != _SOURCE or parameter.grad is None:  # else a copy, trained as one
            wrong.setdefault(tie.otherwise, []).append(group.names[tie.number])
    if wrong:
        got = "; ".join(
            f"{kind} of {', '.join(names[:4])}{' ...' if names[4:] else ''}"
            for kind, names in wrong.items()
        )
        raise RuntimeError(
            f"Expected an optimizer of the parameters at rest, got {got}: build the optimizer "
            "after fully_shard and to_empty(), and before a forward, or call reshard() first."
        )


def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refresh the groups whose parameters the optimizer has."""
    del kwargs
    if args[0] is not optimizer:
        _off_rows(optimizer, args[0])
    ties = (p.tie for p in _parameters(optimizer) if type(p) is RowSharded)
    # A dict, not a set: every rank must go through the groups in the same order.
    groups = dict.fromkeys(tie.group() for tie in ties if tie is not None)
    with torch.no_grad():
        for group in groups:
            if group is not None:
                group.main_weight_changed()


# --- optimizers whose kernels take addresses --------------------------------------------------


def _takes_addresses(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it must be given plain rows: TransformerEngine's would look for a DTensor's."""
    return any(
        base.__module__.startswith("transformer_engine.") for base in type(optimizer).__mro__
    )


def _on_rows(optimizer: torch.optim.Optimizer, sharded: list[Any]) -> torch.optim.Optimizer:
    """The same optimizer over this rank's rows: plain tensors in the memory of `sharded`.

    For one step. The optimizer itself is left as it is, even if the step raises.
    """
    dtypes = getattr(optimizer, "name_to_dtype_map", {})
    if any(dtype != torch.float32 for dtype in dtypes.values()):
        raise NotImplementedError(
            f"Expected states of sharded parameters in float32, got {dtypes}."
        )
    rows = {parameter: parameter._local_tensor for parameter in sharded}
    groups = [
        group | {"params": [rows.get(parameter, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state: Any = defaultdict(dict)
    state.update({p: optimizer.state[p] for p in _parameters(optimizer) if p not in rows})
    for parameter, local in rows.items():
        states = optimizer.state[parameter].items()
        state[local] = {key: getattr(value, "_local_tensor", value) for key, value in states}
        # TransformerEngine's kernels up to 2.17 go wrong over tensors without elements.
        has = parameter.grad is not None and local.numel()
        local.grad = parameter.grad._local_tensor if has else None
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__ | {"param_groups": groups, "state": state})
    return twin


def _off_rows(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    """Give the optimizer what a step of its twin over rows has changed."""
    for group, changed in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update(changed | {"params": group["params"]})
    for parameter, local in zip(_parameters(optimizer), _parameters(twin), strict=True):
        if parameter is local:
            optimizer.state[parameter] = twin.state[parameter]
            continue
        states, local.grad = optimizer.state[parameter], None
        for key, value in twin.state[local].items():
            if getattr(states.get(key), "_local_tensor", None) is not value:
                states[key] = RowSharded.make(value, parameter.row_spec)
