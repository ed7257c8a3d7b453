"""Names of everything long-lived on a rank, and how much of it moved in a step.

Each name is looked up where the program keeps the tensor, when somebody asks: a parameter in its
group, a buffer in its module, moments in the optimizer. So whoever replaces one is found out.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.graph.ledger import AddressBook, AddressLog, Getter
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.optim import AdamW

_FLAT = ("main_weight", "model_weight", "gathered")
_FLAT_GRADS = ("main_grad", "pooled")
_GRADS = ("main_grad", "full gradient")


def holds_gradients(name: str) -> bool:
    """Whether a tensor of this name has gradients in it."""
    return name.partition(" ")[2].startswith(_GRADS)


def enter_stage(
    book: AddressBook, stage: nn.Module, groups: Iterable[ParamGroup], suffix: str
) -> None:
    """Names of a stage's gathered parameters, flat buffers, module buffers and scales of fp8.

    Args:
        suffix: tells stages of one rank apart where names of tensors do not.
    """
    for group in groups:
        for index, name in enumerate(group.names):
            book.enter(name, _item(group.unsharded, index), _is_gathered(group))
        for kind in _FLAT:
            book.enter(f"{group.name} {kind}{suffix}", _attribute(group, kind))
        for kind in _FLAT_GRADS:
            shown = "full gradient" if kind == "pooled" else kind
            book.enter(f"{group.name} {shown}{suffix}", _attribute(group.gradients, kind))
    for path, module in stage.named_modules():
        for name in module._buffers:
            book.enter(f"{path}.{name}".lstrip(".") + suffix, _buffer(module, name))
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
            book.enter(f"{name} {part}", _item(tensors, index))
    book.enter("step_count", lambda: optimizer.step_count)
    book.enter("lr", lambda: optimizer.lr)


def enter_attributes(
    book: AddressBook, owner: object, named: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Names that an owner gives; looked up again where they are names of its attributes."""
    for name, tensor in named:
        if getattr(owner, name, None) is tensor:
            book.enter(name, _attribute(owner, name))
        else:
            book.hold(name, tensor)


class PointerChanges:
    """Counts per step how many long-lived tensors moved: what makes recorded graphs be made anew.

    Gathered parameters are counted at each gather, all else once, between two counts.
    """

    def __init__(self, book: AddressBook, groups: Sequence[ParamGroup]) -> None:
        gathered = {
            name for group in groups if group.nest.weight_level for name in group.names
        }  # fmt: skip
        flat = {f" {kind}" for kind in ("gathered", "full gradient")}
        names = [
            name for name in book
            if name not in gathered and not any(kind in name for kind in flat)
        ]  # fmt: skip
        self._log = AddressLog(lambda: {name: book[name] for name in names})
        self._groups = groups
        self._last = self._num_moved
        self._log.look()

    @property
    def _num_moved(self) -> int:
        return sum(group.num_moved for group in self._groups)

    def count(self) -> int:
        """Changes since the last count, or since construction."""
        last, self._last = self._last, self._num_moved
        return self._last - last + self._log.look()

    @property
    def moved(self) -> list[str]:
        """Names of what moved before the last count, but for gathered parameters."""
        return self._log.moved


def _item(held: Sequence[torch.Tensor], index: int) -> Getter:
    return lambda: held[index]


def _is_gathered(group: ParamGroup) -> Callable[[], bool]:
    """Whether the gather was waited for: before, the address is right and the weights are not."""
    return lambda: group.is_registered


def _attribute(owner: object, name: str) -> Getter:
    return lambda: getattr(owner, name)


def _buffer(module: nn.Module, name: str) -> Getter:
    return lambda: module._buffers.get(name)
