"""Names of everything long-lived on a rank, and how much of it moved in a step.

Each name is looked up where the program keeps the tensor, when somebody asks: a parameter in its
group, a buffer in its module, moments in the optimizer. So whoever replaces one is found out.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.graph.ledger import AddressBook
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.optim import AdamW

_FLAT = ("main_weight", "model_weight", "gathered")
_FLAT_GRADS = {"main_grad": "main_grad", "pooled": "full gradient"}


def holds_gradients(name: str) -> bool:
    """Whether a tensor of this name has gradients in it."""
    return name.partition(" ")[2].startswith(tuple(_FLAT_GRADS.values()))


def enter_stage(
    book: AddressBook, stage: nn.Module, groups: Iterable[ParamGroup], suffix: str
) -> None:
    """Names of a stage's gathered parameters, flat buffers, module buffers and scales of fp8.

    Args:
        suffix: tells stages of one rank apart where names of tensors do not.
    """
    for group in groups:
        # Before the gather was waited for, the address is right and the weights are not.
        is_held = partial(getattr, group, "is_registered")
        for index, name in enumerate(group.names):
            book.enter(name, partial(group.unsharded.__getitem__, index), is_held)
        for kind in _FLAT:
            book.enter(f"{group.name} {kind}{suffix}", partial(getattr, group, kind))
        for kind, shown in _FLAT_GRADS.items():
            book.enter(f"{group.name} {shown}{suffix}", partial(getattr, group.gradients, kind))
    for path, module in stage.named_modules():
        for name in module._buffers:
            book.enter(f"{path}.{name}".lstrip(".") + suffix, partial(module._buffers.get, name))
    if isinstance(stage, DecoderStage):
        for name, getter in stage.around.state(stage):
            book.enter(name + suffix, getter)


def enter_optimizer(book: AddressBook, optimizer: AdamW) -> None:
    """Names of this rank's rows: weights, gradients and moments, and of the scalars."""
    parts: dict[str, Sequence[torch.Tensor]] = {
        "main_weight": optimizer.params, "main_grad": optimizer.grads,
        "exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq,
    }  # fmt: skip
    for part, tensors in parts.items():
        for index, name in enumerate(optimizer.names):
            book.enter(f"{name} {part}", partial(tensors.__getitem__, index))
    for scalar in ("step_count", "lr"):
        book.enter(scalar, partial(getattr, optimizer, scalar))


def enter_attributes(
    book: AddressBook, owner: object, named: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Names that an owner gives; looked up again where they are names of its attributes."""
    for name, tensor in named:
        if getattr(owner, name, None) is tensor:
            book.enter(name, partial(getattr, owner, name))
        else:
            book.hold(name, tensor)


class PointerChanges:
    """Counts per step how many long-lived tensors moved: what makes recorded graphs be made anew.

    Gathered parameters are counted at each gather, all else once, between two counts.

    Attributes:
        moved: names of what moved before the last count, but for gathered parameters.
    """

    def __init__(self, book: AddressBook, groups: Sequence[ParamGroup]) -> None:
        gathered = {name for group in groups if group.nest.weight_level for name in group.names}
        self._book, self._groups = book, groups
        self._names = [
            name for name in book
            if name not in gathered and " gathered" not in name and " full gradient" not in name
        ]  # fmt: skip
        self._num_moved, self._addresses = self._now()
        self.moved: list[str] = []

    def _now(self) -> tuple[int, dict[str, int]]:
        addresses = {name: self._book[name].data_ptr() for name in self._names}
        return sum(group.num_moved for group in self._groups), addresses

    def count(self) -> int:
        """Changes since the last count, or since construction."""
        num_before, before = self._num_moved, self._addresses
        self._num_moved, self._addresses = self._now()
        self.moved = [name for name in self._names if self._addresses[name] != before[name]]
        return self._num_moved - num_before + len(self.moved)
