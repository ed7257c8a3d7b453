"""fp8: recipes by name, and the context in which TransformerEngine's layers compute by one.

| fp8 | TransformerEngine's recipe | scales |
| --- | --- | --- |
| none | - | compute dtype |
| delayed | DelayedScaling | one a tensor, from the largest values of earlier steps |
| current | Float8CurrentScaling | one a tensor, from its values now |
| block | Float8BlockScaling | one each 128 or 128 x 128 elements |

All layers of the decoder compute so. What is left in the compute dtype: embedding, head and loss,
the router, attention itself, and key projections that are narrower than fp8 can be; the first and
the last matrix of the model are what users of fp8 keep wide.

Ranks of tp and cp hold parts of the same tensors, so delayed scaling takes the largest values over
both: parts that are gathered or summed have one scale. Ranks of dp have other tokens, and scales of
their own; ranks of ep lie across tp x cp groups, or across dp, and need nothing of their own, since
the rows of an expert are whole before it multiplies them.
"""

from typing import Any

import torch.distributed as dist

from fsdp_core.model.around import Around, Plain
from fsdp_core.model.te.scaling import Scaling
from fsdp_core.parallel.mesh import Axes

ROW_MULTIPLE = 16
"""Rows of an operand that fp8's kernels want a multiple of."""


def recipe_of(fp8: str) -> Any:
    """TransformerEngine's recipe of a name.

    Raises:
        ValueError: there is none of that name.
    """
    from transformer_engine.common import recipe

    recipes = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
    }
    if fp8 not in recipes:
        raise ValueError(f"Expected fp8 to be none, {', '.join(recipes)}, got {fp8!r}.")
    return recipes[fp8]()


def autocast(te: Any, fp8: str, axes: Axes, recipe: Any = None) -> Around:
    """What is around the layers' forward. A collective over all ranks, for delayed scaling.

    Args:
        te: the module `transformer_engine.pytorch`.
        recipe: in place of the one of that name.
    """
    if fp8 == "none":
        return Plain()
    recipe = recipe_of(fp8) if recipe is None else recipe
    if fp8 != "delayed":
        return Scaling(te, recipe, None)
    group = amax_group(axes)
    # Of no group TransformerEngine takes the whole world: stages of a pipeline, whose microbatches
    # end at other times, would wait for one another.
    recipe.reduce_amax = group is not None
    return Scaling(te, recipe, group)


def amax_group(axes: Axes) -> dist.ProcessGroup | None:
    """The ranks of this one's tp and cp; None if there is no other. All ranks call it together."""
    tp, cp = axes.tp, axes.cp
    if tp.size == cp.size == 1:
        return None
    if cp.size == 1:
        return tp.group
    if tp.size == 1:
        return cp.group
    # tp and cp are the fastest of the dense axes (`fsdp_core.layouts`): stretches of ranks.
    size, world = tp.size * cp.size, dist.get_world_size()
    key = (size, world, dist.group.WORLD)
    if key not in _GROUPS:
        stretches = [list(range(start, start + size)) for start in range(0, world, size)]
        own, _ = dist.new_subgroups_by_enumeration(stretches)
        _GROUPS[key] = own
    return _GROUPS[key]


_GROUPS: dict[Any, Any] = {}
"""Groups that were made, by sizes and world: every stage of a model asks."""
