"""fp8's scales under graphs: who moves them, when, and what is put back.

With delayed scaling, kernels write the largest value of what they quantise, and TransformerEngine
moves scales by these twice a microbatch, over all modules that registered:

    at the end of the outermost autocast         scales of the forward
    in the backward of the first module in it    scales of the backward: it runs last

Both reduce over ranks, and concern modules outside of a graph as well as inside, so no part of a
layer that is captured may hold them (TransformerEngine's own graphs: `_make_graphed_callables` in
graph.py, `autocast_exit` in quantization.py). A captured part is therefore entered with `_graph`,
which leaves out the first, and with the mark of the first module taken, which leaves out the
second; not every module asks whether TransformerEngine is capturing (grouped_linear.py does not). A
replay then does for its modules what they do in Python: it registers them, takes the mark if none
before it has, and, if it took it, moves the backward's scales after its own backward.

So scales move where they move eagerly, between the same kernels, and by the same values. With the
other recipes there is nothing to move; entered likewise, they do not move scales of a model that
somebody left behind, either.

The attributes of modules and operators are those of version 2.20.

fp8: recipes by name, and the context in which TransformerEngine's layers compute by one.

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

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.model.layers import After, Begin, Getter, Precision
from fsdp_core.parallel.mesh import Axes

Meta = dict[str, Any]
"""What a module or operator knows of its scales: `fp8_meta`, or one of `_fp8_metas`."""

_KEYS = {"scaling_fwd": "forward", "scaling_bwd": "backward"}
_FRESH = {"scale": 1.0, "amax_history": 0.0}


class Scaling(Precision):
    """`layers.Precision` by a recipe of fp8. `te`: the module `transformer_engine.pytorch`.
    `group`: over which largest values are taken, of delayed scaling.
    """

    def __init__(self, te: Any, recipe: Any, group: Any) -> None:
        self._te = te
        self._options = {"enabled": True, "recipe": recipe, "amax_reduction_group": group}

    @property
    def _global(self) -> Any:
        return self._te.quantization.FP8GlobalStateManager

    def __call__(self) -> AbstractContextManager[Any]:
        """Scales of the forward move at the end, if gradients are on."""
        context: AbstractContextManager[Any] = self._te.autocast(**self._options)
        return context

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        with self._te.autocast(**self._options, _graph=True):
            self._global.is_first_fp8_module()
            yield

    def replays(self, modules: Iterable[nn.Module]) -> Begin:
        """Registers modules, and moves the backward's scales if these are the first modules. Every
        part of a layer begins with a module that asks for that mark, fp8 or not: a norm or a
        projection. So no look is taken at which of them would.
        """
        metas = [meta for module in modules for _, meta in _metas(module)]
        return functools.partial(self._begin, metas)

    def _begin(self, metas: list[Meta]) -> After | None:
        for meta in metas:
            self._global.add_fp8_tensors_to_global_buffer(meta)
        if not self._global.is_first_fp8_module():
            return None
        return functools.partial(self._global.reduce_and_update_fp8_tensors, forward=False)

    def state(self, root: nn.Module) -> Iterator[tuple[str, Getter]]:
        for path, meta in _metas(root):
            for key, phase in _KEYS.items():
                if hasattr(meta.get(key), "amax_history"):
                    for kind in _FRESH:
                        name = f"{path} fp8 {phase} {kind}".lstrip()
                        yield name, functools.partial(_held, meta, key, kind)

    def remember(self, root: nn.Module) -> Callable[[], None]:
        """A module makes its scales when it first runs: those that come later begin anew."""
        saved = {
            name: tensor.detach().clone()
            for name, get in self.state(root)
            if (tensor := get()) is not None
        }
        return functools.partial(self._put_back, root, saved)

    @torch.no_grad()
    def _put_back(self, root: nn.Module, saved: dict[str, torch.Tensor]) -> None:
        for name, get in self.state(root):
            tensor = get()
            assert tensor is not None
            if name in saved:
                tensor.copy_(saved[name])
            else:
                tensor.fill_(_FRESH[name.rpartition(" ")[2]])


def _metas(root: nn.Module) -> Iterator[tuple[str, Meta]]:
    """What modules inside know of their scales, and operators that are no modules of the model."""
    for path, module in root.named_modules():
        meta = getattr(module, "fp8_meta", None)
        if isinstance(meta, dict):
            yield path, meta
        operators = getattr(getattr(module, "kernel", None), "operators", ())
        for number, operator in enumerate((module, *operators)):
            metas = getattr(operator, "_fp8_metas", None) or {}
            for meta in metas.values():
                if meta is not None:
                    yield f"{path} operator {number}".lstrip(), meta


def _held(meta: Meta, key: str, kind: str) -> torch.Tensor | None:
    return getattr(meta.get(key), kind, None)


ROW_MULTIPLE = 16
"""Rows of an operand that fp8's kernels want a multiple of."""


def recipe_of(fp8: str) -> Any:
    """TransformerEngine's recipe of a name (`ValueError`: there is none of that name)."""
    from transformer_engine.common import recipe

    recipes = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
    }
    if fp8 not in recipes:
        raise ValueError(f"Expected fp8 to be none, {', '.join(recipes)}, got {fp8!r}.")
    return recipes[fp8]()


def precision(te: Any, fp8: str, axes: Axes, recipe: Any = None) -> Precision:
    """What is around the layers' forward. A collective over all ranks, for delayed scaling. `te`:
    the module `transformer_engine.pytorch`. `recipe`: in place of the one of that name.
    """
    if fp8 == "none":
        return Precision()
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
    # tp and cp are the fastest of the dense axes (`fsdp_core.config.parallel`): stretches of ranks.
    size, world = tp.size * cp.size, dist.get_world_size()
    key = (size, world, dist.group.WORLD)
    if key not in _GROUPS:
        stretches = [list(range(start, start + size)) for start in range(0, world, size)]
        own, _ = dist.new_subgroups_by_enumeration(stretches)
        _GROUPS[key] = own
    return _GROUPS[key]


_GROUPS: dict[Any, Any] = {}
"""Groups that were made, by sizes and world: every stage of a model asks."""
