"""Chooses the modules of a rank that a run's `taps` mean."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import ConfigError, TrainConfig, tap_pattern
from fsdp_core.graph.taps import Tap, Taps
from fsdp_core.parallel.axes import Axis


def open_taps(
    config: TrainConfig, stages: Sequence[nn.Module], pp: Axis, device: torch.device
) -> Taps:
    """Watch what `config.taps` means of these stages; collective where there are any.

    Raises:
        ConfigError: a pattern that means no module on any rank.
    """
    patterns = [tap_pattern(text) for text in config.taps]
    chosen = [
        [
            Tap(name, module, pattern.kind, chunk * pp.size + pp.rank)
            for chunk, stage in enumerate(stages)
            for name, module in _callable(stage)
            if pattern.matches(name)
        ]
        for pattern in patterns
    ]
    if patterns:
        _require_found(config.taps, chosen, device)
    # Two patterns may mean one module; it is looked into once.
    taps = {(tap.name, tap.kind): tap for each in chosen for tap in each}
    return Taps(list(taps.values()), config.microbatches, device)


def _callable(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are called, by the names that they have in the whole model."""
    for name, module in stage.named_modules():
        if name and not isinstance(module, nn.ModuleDict | nn.ModuleList):
            yield name, module


def _require_found(
    texts: Sequence[str], chosen: Sequence[Sequence[Tap]], device: torch.device
) -> None:
    """No rank has all modules, so the ranks ask each other."""
    found = torch.tensor([len(each) for each in chosen], device=device)
    dist.all_reduce(found)
    for text, number in zip(texts, found.tolist(), strict=True):
        if not number:
            raise ConfigError("taps", expected="a pattern that means a module", got=text)
