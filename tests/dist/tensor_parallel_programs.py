"""Global tensors that every rank draws alike and takes its part of, and parts put together."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.tensor_parallel import Cut, named_cuts, take
from tests.dist.parity_bounds import Named
from tests.support.global_weights import place
from tests.support.tensors import same_bits

BATCH, TIME, HIDDEN, VOCAB = 2, 16, 24, 40
Parts = dict[str, tuple[torch.Tensor, tuple[Cut, ...]]]
"""A rank's parts of global tensors by name."""


def draw(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The global tensor `name`: mostly positive, so that sums do not hide what is missing."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 0.5).to(dtype)


def whole_axis(name: str = "tp") -> Axis:
    group = dist.group.WORLD
    assert group is not None
    return Axis(name, dist.get_world_size(), dist.get_rank(), group)


def tokens_of(name: str = "tokens") -> torch.Tensor:
    """int64 [B, T]."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(0, VOCAB, (BATCH, TIME), generator=generator)


def load(model: nn.Module, weights: Named) -> None:
    """Give each parameter its part of its global weight."""
    cuts = named_cuts(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(take(weights[name], cuts[name]))


def gradient_parts(model: nn.Module) -> Parts:
    found, cuts = {}, named_cuts(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = (parameter.grad, cuts[name])
    return found


def join(ranks: list[Parts]) -> tuple[Named, set[str]]:
    """Global tensors out of every rank's parts, and names of those on which replicas disagree."""
    found, disputed = {}, set()
    for name, (first, cuts) in ranks[0].items():
        shape = list(first.shape)
        for cut in cuts:
            shape[cut.dim] *= cut.axis_size
        whole = torch.full(shape, torch.nan, dtype=first.dtype)
        for rank in ranks:
            place(rank[name][0], whole, rank[name][1])
        if not all(same_bits(take(whole, r[name][1]), r[name][0]) for r in ranks):
            disputed.add(name)
        found[name] = whole
    return found, disputed
