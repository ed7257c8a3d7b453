"""GQA and MLA with TransformerEngine's layers: norm and projections in one, then attention.

    GQA    LayerNormLinear(norm, wq, wk, wv) -> (norms of heads) -> RoPE -> Core -> Linear(wo)
    MLA    norm -> Linear(wq_down) -> LayerNormLinear(q_norm, wq) -----------> RoPE -> Core -> wo
                -> Linear(wkv_down) -> LayerNormLinear(kv_norm, wk, wv)
                -> wk_rope, of torch: too narrow for fp8

Weights that share an input are parameters of their own (`parameters_split`), so they have the names
and cuts of `model.gqa` and `model.mla`; TransformerEngine multiplies them as one.
"""

from typing import Any

import torch
from torch import nn

from fsdp_core.model.backend import Backend, TorchBackend
from fsdp_core.model.gqa import GqaShape
from fsdp_core.model.microbatch import Part
from fsdp_core.model.mla import MlaShape
from fsdp_core.model.norm import make_norm, make_replicated_linear
from fsdp_core.model.rope import RopeTable
from fsdp_core.model.te.core import Core
from fsdp_core.model.te.order import by_rank, by_sequence, columns, layer_options, rows
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Stretch, chunk_of, set_stretches
from fsdp_core.parallel.tensor_parallel import enter, reduce_replicated_of


class _Split:
    """A layer's options on a layout: what every projection is made with."""

    def __init__(self, te: Any, tp: Axis, eps: float, *, sequence_parallel: bool) -> None:
        self._te, self._tp, self._eps = te, tp, eps
        self._sp = sequence_parallel and tp.size > 1
        self._options = layer_options(tp, sequence_parallel=sequence_parallel)

    def normed(self, in_features: int, widths: dict[str, int]) -> nn.Module:
        """An RMSNorm and the layers `widths` behind it, whose outputs are cut over tp."""
        layer: nn.Module = self._te.LayerNormLinear(
            in_features,
            sum(widths.values()),
            eps=self._eps,
            normalization="RMSNorm",
            zero_centered_gamma=False,
            parallel_mode="column",
            parameters_split=widths,
            **self._options,
        )
        if self._sp:
            reduce_replicated_of(layer, ["layer_norm_weight"], self._tp)
        return layer

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """A layer whose outputs are cut over tp."""
        layer: nn.Module = self._te.Linear(
            in_features, out_features, parallel_mode="column", **self._options
        )
        return layer

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """A layer whose inputs are cut over tp."""
        layer: nn.Module = self._te.Linear(
            in_features, out_features, parallel_mode="row", **self._options
        )
        return layer


class GroupedQueryAttention(nn.Module):
    """[B, T, H] -> [B, T, H], norm included, residual not; see `model.gqa` for the layout.

    Args:
        te: the module `transformer_engine.pytorch`.
        eps: of the norm before the projections.

    Raises:
        ValueError: tp does not divide the heads.
    """

    def __init__(
        self,
        te: Any,
        shape: GqaShape,
        rope: RopeTable,
        axes: tuple[Axis, Axis],
        eps: float,
        *,
        sequence_parallel: bool,
        backend: Backend,
    ) -> None:
        super().__init__()
        tp, cp = axes
        self.tp, self.sequence_parallel, self.rope = tp, sequence_parallel, rope
        self.head_dim = width = shape.head_dim
        heads = chunk_of(shape.heads, "heads", tp.name, tp.size)
        kv_heads = chunk_of(shape.kv_heads, "kv_heads", tp.name, tp.size)
        self._widths = (heads * width, kv_heads * width, kv_heads * width)
        make = _Split(te, tp, eps, sequence_parallel=sequence_parallel)
        kv_width = shape.kv_heads * width
        self.qkv = make.normed(
            shape.hidden, {"wq": shape.heads * width, "wk": kv_width, "wv": kv_width}
        )
        self.wo = make.row(shape.heads * width, shape.hidden)
        self.core = Core(te, heads, kv_heads, (width, width), cp)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if shape.norm_eps is not None:
            self.q_norm = make_norm(backend, width, shape.norm_eps, tp, sees_part=True)
            self.k_norm = make_norm(backend, width, shape.norm_eps, tp, sees_part=True)
        table = {f"qkv.{n}_weight": Stretch(f"{n}.weight", columns(tp)) for n in ("wq", "wk", "wv")}
        set_stretches(self, table | {
            "qkv.layer_norm_weight": Stretch("../norm.weight"),
            "wo.weight": Stretch("wo.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        cut: dict[str, Any] = {"sequence_parallel": self.sequence_parallel}
        projected = by_sequence(self.qkv(x_BTH), self.tp, **cut)
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)) for t in projected.split(self._widths, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        positions = part.plan.positions
        out = self.core(self.rope(q, positions), self.rope(k, positions), v, part)
        result: torch.Tensor = self.wo(by_rank(out, self.tp, **cut))
        return result


class LatentAttention(nn.Module):
    """[B, T, H] -> [B, T, H], norm included, residual not; see `model.mla` for the layout.

    Args:
        te: the module `transformer_engine.pytorch`.

    Raises:
        ValueError: tp does not divide the heads.
    """

    def __init__(
        self,
        te: Any,
        shape: MlaShape,
        rope: RopeTable,
        axes: tuple[Axis, Axis],
        *,
        sequence_parallel: bool,
        backend: Backend,
    ) -> None:
        super().__init__()
        tp, cp = axes
        self.shape, self.tp, self.sequence_parallel, self.rope = shape, tp, sequence_parallel, rope
        heads, hidden = shape.heads, shape.hidden
        local = chunk_of(heads, "heads", tp.name, tp.size)
        make = _Split(te, tp, shape.norm_eps, sequence_parallel=sequence_parallel)
        part: dict[str, Any] = {"sees_part": sequence_parallel}
        q_width = heads * (shape.nope_dim + shape.rope_dim)
        self.norm = make_norm(backend, hidden, shape.norm_eps, tp, **part)
        self.wq_down: nn.Module | None = None
        names: dict[str, Stretch] = {"norm.weight": Stretch("../norm.weight")}
        if shape.q_lora_rank is None:
            self.wq = make.column(hidden, q_width)
            names["wq.weight"] = Stretch("wq.weight", columns(tp))
        else:
            self.wq_down = make_replicated_linear(backend, hidden, shape.q_lora_rank, tp, **part)
            self.wq = make.normed(shape.q_lora_rank, {"wq": q_width})
            names["wq.layer_norm_weight"] = Stretch("q_norm.weight")
            names["wq.wq_weight"] = Stretch("wq.weight", columns(tp))
        self.wkv_down = make_replicated_linear(backend, hidden, shape.kv_lora_rank, tp, **part)
        self.wk_rope = make_replicated_linear(TorchBackend(), hidden, shape.rope_dim, tp, **part)
        self._widths = (local * shape.nope_dim, local * shape.v_dim)
        self.wkv = make.normed(
            shape.kv_lora_rank, {"wk": heads * shape.nope_dim, "wv": heads * shape.v_dim}
        )
        self.wo = make.row(heads * shape.v_dim, hidden)
        self.core = Core(te, local, local, (shape.nope_dim + shape.rope_dim, shape.v_dim), cp)
        set_stretches(self, names | {
            "wkv.layer_norm_weight": Stretch("kv_norm.weight"),
            "wkv.wk_weight": Stretch("wk.weight", columns(tp)),
            "wkv.wv_weight": Stretch("wv.weight", columns(tp)),
            "wo.weight": Stretch("wo.weight", rows(tp)),
        })  # fmt: skip

    def forward(self, x_BTH: torch.Tensor, part: Part) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        shape, positions, cut = self.shape, part.plan.positions, self.sequence_parallel
        x_BTH = self.norm(x_BTH)
        q = self._heads(self.wq(x_BTH if self.wq_down is None else self.wq_down(x_BTH)))
        q_nope, q_rope = q.split((shape.nope_dim, shape.rope_dim), dim=-1)
        q = torch.cat((q_nope, self.rope(q_rope, positions)), dim=-1)
        both = by_sequence(self.wkv(self.wkv_down(x_BTH)), self.tp, sequence_parallel=cut)
        k_nope, v = (t.unflatten(-1, (q.shape[2], -1)) for t in both.split(self._widths, dim=-1))
        k_rope = enter(self.wk_rope(x_BTH), self.tp, sequence_parallel=cut)
        k_rope = self.rope(k_rope.unsqueeze(2), positions).expand(-1, -1, k_nope.shape[2], -1)
        out = self.core(q, torch.cat((k_nope, k_rope), dim=-1), v, part)
        result: torch.Tensor = self.wo(by_rank(out, self.tp, sequence_parallel=cut))
        return result

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, heads * width] in the layers' order of tokens -> [B, T, heads, width]."""
        whole = by_sequence(x, self.tp, sequence_parallel=self.sequence_parallel)
        return whole.unflatten(-1, (self.shape.heads // self.tp.size, -1))
