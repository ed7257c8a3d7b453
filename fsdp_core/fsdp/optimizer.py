"""What must happen around the step of an optimizer over sharded parameters.

    before  an optimizer that would not train what the modules hold is refused
    after   copies of the main weights follow, once a group, inside a graph capture as well

Every `torch.optim.Optimizer` runs hooks that are registered once for the process, so nobody has to
say which optimizers there are. Version counters would not do for the copies: an optimizer may write
by a kernel of its own (TransformerEngine's FusedAdam does).
"""

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(eq=False)
class Owner:
    """Ties a parameter at rest to its group, for as long as the group's modules hold it."""

    group: "weakref.ref[ParamGroup]"
    is_current: bool = True


_OWNERS: "weakref.WeakKeyDictionary[ParamGroup, Owner]" = weakref.WeakKeyDictionary()
_STAND_INS: Any = WeakIdKeyDictionary()
"""Parameters that modules hold in place of those at rest: their group, number in it, and kind."""

_GATHERED, _SOURCE, _REPLACED = (
    "gathered ones",
    "the ones from before fully_shard",
    "the ones from before to_empty() or to()",
)


def watch(
    group: "ParamGroup",
    sharded: list[nn.Parameter],
    unsharded: list[nn.Parameter],
    sources: list[nn.Parameter],
) -> None:
    """Tell `group`, which is not kept alive, of every step of an optimizer of its parameters.

    Optimizers that have other parameters in their place are refused. To call again when those at
    rest have been replaced: optimizers that have the old ones are refused from then on.

    Args:
        group: what `main_weight_changed` is called of.
        sharded: its parameters at rest.
        unsharded: the same while gathered.
        sources: the same before they were sharded; none when called again.
    """
    _register_hooks()
    if group in _OWNERS:
        _OWNERS[group].is_current = False
    owner = _OWNERS[group] = Owner(weakref.ref(group))
    for parameter in sharded:
        parameter.watched_by = owner  # type: ignore[attr-defined]
    for kind, stand_ins in ((_SOURCE, sources), (_GATHERED, unsharded)):
        for number, parameter in enumerate(stand_ins):
            _STAND_INS[parameter] = (owner.group, number, kind)


@functools.cache
def _register_hooks() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer of parameters that modules do not hold at rest: it would train nothing.

    Raises:
        RuntimeError: naming them.
    """
    del args, kwargs
    wrong: dict[str, list[str]] = {}
    for parameter in _parameters(optimizer):
        if found := _in_place_of(parameter):
            wrong.setdefault(found[0], []).append(found[1])
    if wrong:
        got = "; ".join(
            f"{kind} of {', '.join(names[:4])}{' ...' if names[4:] else ''}"
            for kind, names in wrong.items()
        )
        raise RuntimeError(
            f"Expected an optimizer of the parameters at rest, got {got}: build the optimizer "
            "after fully_shard and to_empty(), and before a forward, or call reshard() first."
        )


def _in_place_of(parameter: Any) -> tuple[str, str] | None:
    """What a parameter is if not one at rest that somebody holds, and the name of that one."""
    if type(parameter) is RowSharded:
        owner: Owner | None = parameter.watched_by
        if owner is None or owner.is_current:
            return None
        group, kind = owner.group(), _REPLACED
        number = group.specs.index(parameter.row_spec) if group is not None else 0
    else:
        known, number, kind = _STAND_INS.get(parameter, (lambda: None, 0, ""))
        group = known()
        if kind == _SOURCE and parameter.grad is not None:
            return None  # kept as a copy, and trained as one
    return None if group is None else (kind, group.names[number])


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refresh the groups whose parameters the optimizer has."""
    del args, kwargs
    owners = (p.watched_by for p in _parameters(optimizer) if type(p) is RowSharded)
    # A dict, not a set: every rank must go through the groups in the same order.
    groups = dict.fromkeys(owner.group() for owner in owners if owner is not None)
    with torch.no_grad():
        for group in groups:
            if group is not None:
                group.main_weight_changed()
