"""Learning that an optimizer has changed main weights, so that copies of them follow.

Writing through torch operators shows in version counters, but an optimizer may write by a kernel of
its own (TransformerEngine's FusedAdam does). Every `torch.optim.Optimizer` runs torch's registered
hooks after its step, so one hook for the whole process brings the copies up to date, once a group,
inside a graph capture as well as outside.
"""

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from fsdp_core.fsdp.param_group import ParamGroup

_GROUPS: "weakref.WeakValueDictionary[int, ParamGroup]" = weakref.WeakValueDictionary()
"""The group of each parameter at rest, by its id, which lasts: a group holds its parameters."""


def watch(parameters: list[nn.Parameter], group: "ParamGroup") -> None:
    """Tell `group` of every step of an optimizer that has one of `parameters`."""
    for parameter in parameters:
        _GROUPS[id(parameter)] = group
    _register_hook()


@functools.cache
def _register_hook() -> Any:
    return register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refresh the groups whose parameters the optimizer has."""
    del args, kwargs
    # A dict, not a set: every rank must go through the groups in the same order.
    groups = {
        _GROUPS.get(id(parameter)): None
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    with torch.no_grad():
        for group in groups:
            if group is not None:
                group.main_weight_changed()
