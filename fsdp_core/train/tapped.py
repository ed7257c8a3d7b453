"""Chooses the modules of a rank that a run's `taps` mean."""

import difflib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import ConfigError, TapPattern, TrainConfig, tap_pattern
from fsdp_core.graph.taps import Tap, Taps
from fsdp_core.parallel.mesh import Axis


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
        names = [name for stage in stages for name, _ in _callable(stage)]
        _require_found(patterns, chosen, names, device)
    # Two patterns may mean one module; it is looked into once.
    taps = {(tap.name, tap.kind): tap for each in chosen for tap in each}
    # A row more than a module is called by itself: calls of one that others share go on into it.
    return Taps(list(taps.values()), config.microbatches + 1, device)


def _callable(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are called, by the names that they have in the whole model."""
    for name, module in stage.named_modules():
        if name and not isinstance(module, nn.ModuleDict | nn.ModuleList):
            yield name, module


def _require_found(
    patterns: Sequence[TapPattern],
    chosen: Sequence[Sequence[Tap]],
    names: Sequence[str],
    device: torch.device,
) -> None:
    """No rank has all modules, so the ranks ask each other; `names` are those of this rank."""
    found = torch.tensor([len(each) for each in chosen], device=device)
    dist.all_reduce(found)
    for pattern, number in zip(patterns, found.tolist(), strict=True):
        if not number:
            near = difflib.get_close_matches(pattern.modules, names, n=3, cutoff=0.3)
            expected = "a pattern that means a module"
            if near:
                expected += f" (names like it: {', '.join(near)})"
            raise ConfigError("taps", expected=expected, got=f"{pattern.modules}:{pattern.kind}")
