"""Parts of rows that are one sequence each, without a configuration."""

import torch

from fsdp_core.model.batch import LocalTokens, Part
from fsdp_core.parallel.context import dense_plan, split
from fsdp_core.parallel.mesh import Axis


def dense_part(rows: torch.Tensor, wanted: torch.Tensor, cp: Axis) -> LocalTokens:
    """This context rank's part of rows that are one sequence each, all of whose tokens count.
    `rows`, `wanted`: int64, whole sequences, the same on every rank of `cp`.
    """
    plan = dense_plan(rows.shape[1], cp.size, cp.rank, rows.device)
    tokens, targets = (split(t, 1, cp.size, cp.rank) for t in (rows, wanted))
    return LocalTokens(tokens, Part(plan, cp, targets, None, 1.0 / targets.numel()))
