"""The modules of a decoder's layers by TransformerEngine, chosen in `fsdp_core.model.decoder`.

`LayerNormMLP` keeps gate above up as one parameter: gate.weight is the first half of a rank's rows,
up.weight the second, each with its own cut, so the names and cuts are those of torch's.

Experts are grouped products, gate_up and down, called or fused:

    weight [L, out, in]   one parameter, as torch's experts have it
      --matrices--> L views [out, in], which TransformerEngine takes for its L parameters
      <--backward-- its kernels write all L gradients into one allocation: taken as it is

TransformerEngine's own modules have a parameter an expert. One parameter keeps the names, the cuts
and FSDP's rows those of the torch experts, and costs no copy, where a plain `unbind` would stack
the gradients anew. Kernels want rows in multiples (of 16 for fp8), and none of them takes no rows
at all, so each expert's rows are padded with zeros, whose outputs are cut away again. A rank
without any row computes one padded expert: it then takes part in whatever collectives fp8 has.

fp8's scales under graphs: who moves them, when, and what is put back.

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
import ctypes
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import ModelConfig
from fsdp_core.model.layers import (
    After,
    BackendMissing,
    Begin,
    Getter,
    LayerFactory,
    Precision,
    RopeTable,
)
from fsdp_core.model.moe.dispatcher import Groups
from fsdp_core.model.moe.experts import FusedExperts, GroupedLinear, name_gate_up
from fsdp_core.model.te import attention
from fsdp_core.model.te.attention import columns, layer_options, projection, rows
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.tensor_parallel import (
    Stretch,
    chunk_of,
    consecutive,
    reduce_replicated_of,
    set_stretches,
)

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
    """TransformerEngine's recipe of a name."""
    from transformer_engine.common import recipe

    recipes = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
    }
    return recipes[fp8]()


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


# ---- the factory


class TeLayers(LayerFactory):
    """Makes modules by TransformerEngine; only on Linux with CUDA.

    recipe: none, delayed, current or block: see the module.
    fused_experts: experts by its operators over both layers, not layer by layer; None: where it has
        grouped kernels for that, see `fuses`.
    fused_rope: RoPE by its kernel.
    dtype: compute dtype.
    Raises BackendMissing: TransformerEngine or CUDA is absent.
    """

    def __init__(
        self, *, recipe: str = "none", fused_experts: bool | None = None, fused_rope: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        if importlib.util.find_spec("transformer_engine") is None:
            raise BackendMissing(
                "backend: te needs the package transformer-engine, which is not installed here; "
                "install the extra 'te' on Linux with CUDA, or set backend: torch"
            )
        if not torch.cuda.is_available():
            raise BackendMissing(
                "backend: te needs a CUDA device, and torch sees none; set backend: torch"
            )
        prefer_cudnn_of_torch()
        import transformer_engine.pytorch as te

        if fused_experts is None:
            # In blocks its operators found no kernel at any width (2.20.2 on Hopper).
            made = None if recipe == "none" else recipe_of(recipe)
            fused_experts = recipe != "block" and fuses(te, made, dtype)
        super().__init__(fused_experts=fused_experts, fused_rope=fused_rope)
        self.te: Any = te
        self.recipe = recipe

    def rms_norm(self, width: int, eps: float) -> nn.Module:
        return cast("nn.Module", self.te.RMSNorm(width, eps=eps))

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """`te.Linear`, parameters in float32 as FSDP's main weights are."""
        layer = self.te.Linear(in_features, out_features, bias=False, params_dtype=torch.float32)
        return cast("nn.Module", layer)

    def rope(self, config: ModelConfig) -> RopeTable:
        if not self.fused_rope:
            return super().rope(config)
        return attention.FusedRope(self.te, config.seq, config.rope_dim, config.rope_theta)

    def made_recipe(self) -> Any:
        return recipe_of(self.recipe)

    def precision(self, axes: Axes) -> Precision:
        """What is around the layers' forward. A collective over all ranks, for delayed scaling."""
        if self.recipe == "none":
            return Precision()
        recipe, group = self.made_recipe(), None
        if self.recipe == "delayed":
            group = amax_group(axes)
            # Of no group TransformerEngine takes the whole world: stages of a pipeline, whose
            # microbatches end at other times, would wait for one another.
            recipe.reduce_amax = group is not None
        return Scaling(self.te, recipe, group)

    def attention(
        self, config: ModelConfig, axes: Axes, rope: RopeTable
    ) -> tuple[nn.Module, nn.Module]:
        # The norm is inside of what comes second.
        norm = functools.partial(self._norm, config, axes)
        if config.attention == "mla":
            linear = functools.partial(self._replicated, axes)
            made = attention.LatentAttention(self.te, config, axes, rope, norm, linear)
            return nn.Identity(), made
        return nn.Identity(), attention.GroupedQueryAttention(self.te, config, axes, rope, norm)

    def mlp(self, config: ModelConfig, axes: Axes) -> tuple[nn.Module, nn.Module]:
        return nn.Identity(), Mlp(self.te, config, axes)

    def shared_experts(self, config: ModelConfig, axes: Axes) -> nn.Module | None:
        if not config.shared_expert_ffn:
            return None
        return SharedExperts(self.te, config.hidden, config.shared_expert_ffn, axes)

    def experts(self, config: ModelConfig, axes: Axes) -> nn.Module:
        te, num, hidden, ffn = self.te, config.experts, config.hidden, config.expert_ffn
        multiple = 1 if self.recipe == "none" else ROW_MULTIPLE
        gate_up = GroupedTeLinear(te, num, hidden, 2 * ffn, axes, cut_dim=1, multiple=multiple)
        down = GroupedTeLinear(te, num, ffn, hidden, axes, cut_dim=2, multiple=multiple)
        local, _, width = down.weight.shape
        kernel = OpsKernel(te, (local, hidden, width), multiple) if self.fused_experts else None
        experts = FusedExperts(gate_up, down, kernel)
        name_gate_up(experts, gate_up)
        return experts


def prefer_cudnn_of_torch() -> None:
    """Load every part of the cuDNN that torch brings, before TransformerEngine looks for one.
    TransformerEngine finds a system cuDNN first. cuDNN loads its parts by name when they are
    needed, so two versions in one process share parts, and one of the libraries then fails
    (`BackendMissing`: a part of another cuDNN was loaded before; both are named).
    """
    if importlib.util.find_spec("nvidia") is None:
        return
    spec = importlib.util.find_spec("nvidia.cudnn")
    for folder in (spec and spec.submodule_search_locations) or ():
        # Those that others are linked to come first, or the loader would look for them itself.
        found = sorted(
            Path(folder, "lib").glob("libcudnn*.so*"), key=lambda path: "graph" not in path.name
        )
        for library in found:
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise BackendMissing(
                    f"backend: te needs the cuDNN of torch, which cannot be loaded ({error}); "
                    f"this process has loaded {', '.join(_loaded_cudnn()) or 'no other'}"
                ) from error


def _loaded_cudnn() -> list[str]:
    """Files of cuDNN that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if "libcudnn" in line})


# ---- feed-forwards


class Mlp(nn.Module):
    """down(silu(gate(norm(x))) * up(norm(x))): SwiGLU (Shazeer, 2020), its width cut over tp."""

    def __init__(self, te: Any, config: ModelConfig, axes: Axes) -> None:
        super().__init__()
        tp = axes.tp
        width = chunk_of(config.ffn, "ffn", tp.name, tp.size)
        self.fused = te.LayerNormMLP(
            config.hidden,
            config.ffn,
            eps=config.norm_eps,
            normalization="RMSNorm",
            zero_centered_gamma=False,
            activation="swiglu",
            set_parallel_mode=True,
            **layer_options(tp),
        )
        if tp.cuts_sequence:
            reduce_replicated_of(self.fused, "layer_norm_weight", tp)
        halves = {"gate.weight": width, "up.weight": width}
        set_stretches(self, {
            "fused.layer_norm_weight": Stretch("../norm.weight"),
            "fused.fc1_weight": consecutive(halves, columns(tp)),
            "fused.fc2_weight": Stretch("down.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fused(x_BTH)
        return result


class SharedExperts(nn.Module):
    """The same without the norm, which the router shares: two layers and torch's activation."""

    def __init__(self, te: Any, hidden: int, ffn: int, axes: Axes) -> None:
        super().__init__()
        tp = axes.tp
        chunk_of(ffn, "shared_expert_ffn", tp.name, tp.size)
        halves = {"gate": ffn, "up": ffn}
        self.gate_up = projection(te, "column", hidden, 2 * ffn, tp, parameters_split=halves)
        self.down = projection(te, "row", ffn, hidden, tp)
        set_stretches(self, {
            "gate_up.gate_weight": Stretch("gate.weight", columns(tp)),
            "gate_up.up_weight": Stretch("up.weight", columns(tp)),
            "down.weight": Stretch("down.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x_BTH).chunk(2, -1)
        result: torch.Tensor = self.down(F.silu(gate) * up)
        return result


# ---- experts


def matrices(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The matrices [out, in] of [L, out, in]; their gradients are joined without a copy, if so."""
    result: tuple[torch.Tensor, ...] = _Matrices.apply(weight)
    return result


class _Matrices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del ctx
        return tuple(weight[i] for i in range(weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        return joined(grads)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape as one, [L, ...]: their memory, if it is in a row, else a copy."""
    first, numel = parts[0], parts[0].numel()
    follow = all(
        part.is_contiguous()
        and part.dtype == first.dtype
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and part.storage_offset() == first.storage_offset() + index * numel
        for index, part in enumerate(parts)
    )
    if not follow:
        return torch.stack(tuple(parts))
    shape = (len(parts), *first.shape)
    return first.as_strided(shape, (numel, *first.stride()), first.storage_offset())


def pad_groups(
    rows: torch.Tensor, counts: Sequence[int], multiple: int
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Rows by expert, each expert's filled with zeros to a multiple; and how many each has then. At
    least one multiple in all.
    """
    padded = [-(-count // multiple) * multiple for count in counts]
    if not sum(padded):
        padded[0] = multiple
    if tuple(padded) == tuple(counts):
        return rows, tuple(counts)
    parts = rows.split(tuple(counts))
    filled = [
        F.pad(part, (0, 0, 0, more - part.shape[0]))
        for part, more in zip(parts, padded, strict=True)
    ]
    return torch.cat(filled), tuple(padded)


def unpad_groups(rows: torch.Tensor, counts: Sequence[int], padded: Sequence[int]) -> torch.Tensor:
    """The inverse of `pad_groups`."""
    if tuple(counts) == tuple(padded):
        return rows
    parts = zip(rows.split(tuple(padded)), counts, strict=True)
    return torch.cat([part[:count] for part, count in parts])


class _Flat:
    """Rows [n, H], or [L, n, H], as one row after another in padded groups; and back."""

    def __init__(self, rows: torch.Tensor, groups: Groups | None, multiple: int) -> None:
        self._leading = rows.shape[:-1]
        self._counts = (rows.shape[1],) * rows.shape[0] if groups is None else groups.counts
        self.rows, self.sizes = pad_groups(rows.flatten(0, -2), self._counts, multiple)

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        return unpad_groups(rows, self._counts, self.sizes).unflatten(0, self._leading)


class GroupedTeLinear(GroupedLinear):
    """`te.GroupedLinear` over one parameter [L, out, in]; arguments as `GroupedLinear`'s. `te`: the
    module `transformer_engine.pytorch`. `multiple`: of rows that each expert's are padded to.
    """

    def __init__(
        self,
        te: Any,
        num_experts: int,
        in_features: int,
        out_features: int,
        axes: Axes,
        *,
        cut_dim: int,
        multiple: int,
    ) -> None:
        super().__init__(num_experts, in_features, out_features, axes, cut_dim=cut_dim)
        local, outputs, inputs = self.weight.shape
        self._multiple = multiple
        # Shapes are those of this rank: with tp_size, current scaling would be refused.
        self.engine = _without_parameters(
            te.GroupedLinear(
                local, inputs, outputs, bias=False, params_dtype=torch.float32, device="meta"
            )
        )

    def forward(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        flat = _Flat(rows, groups, self._multiple)
        _lend(self.engine, matrices(self.weight))
        try:
            out = self.engine(flat.rows, list(flat.sizes))
        finally:
            self.engine._parameters.update(dict.fromkeys(self.engine._parameters))
        return flat.restore(out)


def _lend(module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Put tensors where a module's parameters weight0, weight1, ... were."""
    named: dict[str, Any] = {f"weight{i}": tensor for i, tensor in enumerate(tensors)}
    module._parameters.update(named)


def _without_parameters(module: nn.Module) -> nn.Module:
    """A module that was made on the meta device, ready for `_lend`."""
    module._parameters.update(dict.fromkeys(module._parameters))
    where = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in vars(module).items():
        # What stands for an absent bias is a tensor without elements, which kernels look at.
        if isinstance(value, torch.Tensor):
            setattr(module, name, torch.empty(0, dtype=value.dtype, device=where))
    return module


class OpsKernel:
    """`te.ops.Sequential` of grouped linear, scaled SwiGLU, grouped linear: `moe.fused.Kernel`.

    The operators have no parameters of their own: at each call they are given views of the layers'
    weights, also in their list of inputs, which TransformerEngine 2.20 makes once. The views stay
    until the next call, for the backward pass asks the operators for them. Scales are one: tokens'
    weights are applied where outputs are combined. Not a module, so nothing of it is in the model.

    operators: that keep scales of fp8.
    """

    def __init__(self, te: Any, sizes: tuple[int, int, int], multiple: int) -> None:
        local, hidden, width = sizes
        make = te.ops.GroupedLinear
        options = {"bias": False, "device": "meta", "dtype": torch.float32}
        self._first = _without_parameters(make(local, hidden, 2 * width, **options))
        self._last = _without_parameters(make(local, width, hidden, **options))
        self._all = te.ops.Sequential(self._first, te.ops.ScaledSwiGLU(), self._last)
        self.operators: tuple[Any, ...] = (self._first, self._last)
        self._multiple = multiple

    def __call__(
        self, gate_up: nn.Module, down: nn.Module, rows: torch.Tensor, groups: Groups | None
    ) -> torch.Tensor:
        """Rows by expert, [n, H] or [L, n, H], and back."""
        flat = _Flat(rows, groups, self._multiple)
        first, last = matrices(gate_up.weight), matrices(down.weight)  # type: ignore[arg-type]
        _lend(self._first, first)
        _lend(self._last, last)
        self._set_inputs(first, last)
        sizes = _on_device(flat.sizes, rows.device)
        scales = torch.ones(flat.rows.shape[0], dtype=rows.dtype, device=rows.device)
        return flat.restore(self._all(flat.rows, sizes, scales, sizes))

    def _set_inputs(self, first: Sequence[torch.Tensor], last: Sequence[torch.Tensor]) -> None:
        """What the fuser passes to autograd, which it lists when it is made."""
        groups = self._all._module_groups
        if groups is None:
            return  # made at the first call, from what the operators hold by then
        (fuser,) = groups
        fuser._basic_op_params = [list(first), [], list(last)]
        fuser._flat_basic_op_params = [*first, *last]


def _on_device(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Sizes as int64, without a copy from the host where it can be: a capture holds none."""
    if len(set(sizes)) == 1:
        return torch.full((len(sizes),), sizes[0], dtype=torch.int64, device=device)
    return torch.tensor(sizes, dtype=torch.int64, device=device)


def fuses(te: Any, recipe: Any, dtype: torch.dtype) -> bool:
    """Whether TransformerEngine has grouped kernels here that take sizes on the device, by a
    `recipe` of fp8 or None, in a compute `dtype`.

    Else its operators read sizes back to the host in each call, forward and backward: slower than
    `GroupedLinear`, which takes them from there, and nothing that a capture can hold (2.20.2:
    `is_op_fuser_grouped_tensor_path_supported`; cuBLASLt 13.4 at least on Hopper in 16 bits, 13.5
    for current scaling, 13.6 for blocks; delayed scaling nowhere).
    """
    grouped = te.ops.basic.grouped_linear
    return bool(grouped.is_op_fuser_grouped_tensor_path_supported(recipe, dtype))
