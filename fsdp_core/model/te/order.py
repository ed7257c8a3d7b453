"""TransformerEngine's order of tokens under sequence parallel, and cuts of its parameters.

Its layers gather and scatter along dim 0, whatever that is, so activations [B, T / tp, H] become

    [tp * B, T / tp, H]     ranks outermost, in place of [B, T, H]

which no linear layer minds. Only what looks at neighbours, attention, needs sequences whole.
"""

from typing import Any

import torch

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut


def by_sequence(x: torch.Tensor, tp: Axis, *, sequence_parallel: bool) -> torch.Tensor:
    """[tp * B, T / tp, ...] as a column layer returns it -> [B, T, ...]."""
    if not sequence_parallel or tp.size == 1:
        return x
    return x.unflatten(0, (tp.size, -1)).transpose(0, 1).flatten(1, 2)


def by_rank(x: torch.Tensor, tp: Axis, *, sequence_parallel: bool) -> torch.Tensor:
    """[B, T, ...] -> [tp * B, T / tp, ...] as a row layer wants it: the inverse."""
    if not sequence_parallel or tp.size == 1:
        return x
    return x.unflatten(1, (tp.size, -1)).transpose(0, 1).flatten(0, 1)


def layer_options(tp: Axis, *, sequence_parallel: bool) -> dict[str, Any]:
    """Keywords of all of TransformerEngine's linear layers: no bias, float32 main weights."""
    return {
        "bias": False,
        "params_dtype": torch.float32,
        "tp_group": tp.group if tp.size > 1 else None,
        "sequence_parallel": sequence_parallel and tp.size > 1,
    }


def columns(tp: Axis) -> tuple[Cut, ...]:
    """The cut of a layer whose outputs are cut."""
    return (Cut(tp.name, 0, tp.size, tp.rank),)


def rows(tp: Axis) -> tuple[Cut, ...]:
    """The cut of a layer whose inputs are cut."""
    return (Cut(tp.name, 1, tp.size, tp.rank),)
