"""TransformerEngine's parts of the decoder on GPUs, each named where it is wrong."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.config import ModelConfig, ParallelConfig
from fsdp_core.device import Device
from fsdp_core.fsdp import MixedPrecisionPolicy, fully_shard
from fsdp_core.model.batch import (
    Capacity,
    Document,
    LocalTokens,
    pack,
    packed_part,
)
from fsdp_core.model.cp_attention import causal_attention
from fsdp_core.model.decoder import DecoderStage, make_layers, make_stages
from fsdp_core.model.layers import LayerFactory, RopeTable
from fsdp_core.model.moe.dispatcher import Groups
from fsdp_core.model.moe.experts import FusedExperts
from fsdp_core.model.sharding import init_weights, shard_stage
from fsdp_core.model.te.attention import Core
from fsdp_core.model.te.layers import prefer_cudnn_of_torch
from fsdp_core.parallel.context import split
from fsdp_core.parallel.mesh import Axes, build_axes
from fsdp_core.parallel.pipeline import Microbatch, Pipeline, TensorSpec
from fsdp_core.parallel.tensor_parallel import named_stretches
from tests.dist import parity_programs
from tests.dist.parity_check import packs_of, problem_of, reference
from tests.dist.parity_programs import Problem, Routes
from tests.dist.rank_pool import RankPool
from tests.support.dense_parts import dense_part
from tests.support.global_weights import gather_global_grads, load_global

Tensors = dict[str, torch.Tensor]
Found = dict[str, float]
COUNTS = (40, 0, 17, 64, 1, 0, 30, 8)
BATCH, SEQ = 2, 128
_BASE: dict[str, Any] = {"hidden": 256, "heads": 8, "layers": 1, "seq": SEQ}
GQA = ModelConfig(
    **_BASE, kv_heads=4, head_dim=64, ffn=384, experts=8, top_k=2, expert_ffn=128,
    shared_expert_ffn=192,
)  # fmt: skip
NORMED = ModelConfig(**_BASE, kv_heads=2, head_dim=32, ffn=256, qk_norm=True)
MLA = ModelConfig(
    **_BASE, kv_heads=8, attention="mla", q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=64,
    qk_rope_head_dim=32, v_head_dim=64, ffn=256,
)  # fmt: skip
ATTENTION = ("gqa", "normed", "mla")
PARTS = (
    *ATTENTION, "mlp", "shared", "experts fused", "experts called", "padded experts",
)  # fmt: skip


def here() -> Device:
    on_gpu = torch.cuda.is_available()
    return Device("cuda", torch.cuda.current_device()) if on_gpu else Device("cpu")


def axes_of(**degrees: Any) -> Axes:
    """Axes of a layout of all ranks."""
    return build_axes(ParallelConfig(**degrees), here())


class Branch(nn.Module):
    """A norm and what comes behind it, called by their global names."""

    def __init__(self, norm: nn.Module, part: nn.Module) -> None:
        super().__init__()
        self.norm, self.part = norm, part

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        result: torch.Tensor = self.part(self.norm(x), *rest)
        return result


def branch_of(part: str, axes: Axes, backend: Any) -> Branch:
    """A part by its name in `PARTS`, on this rank's device."""
    config = {"normed": NORMED, "mla": MLA}.get(part, GQA)
    rope = RopeTable(config.seq, config.rope_dim, config.rope_theta)
    if part in ATTENTION:
        made = Branch(*backend.attention(config, axes, rope))
    elif part == "mlp":
        made = Branch(*backend.mlp(config, axes))
    else:
        make = backend.shared_experts if part == "shared" else backend.experts
        inner = make(config, axes)
        made = Branch(nn.Identity(), inner)
    return made.to(here().torch_device)


def inputs_of(part: str, axes: Axes, dtype: torch.dtype) -> tuple[Any, ...]:
    """What a part is given, the same for every backend."""
    device = here().torch_device
    generator = torch.Generator().manual_seed(4)
    if part == "padded experts":
        rows = torch.randn(8, 24, GQA.hidden, generator=generator)
        return rows.to(device, dtype), None
    if part.startswith("experts"):
        rows = torch.randn(sum(COUNTS), GQA.hidden, generator=generator)
        ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32).to(device)
        return rows.to(device, dtype), Groups(COUNTS, ends, (), (), None, None)
    x = torch.randn(BATCH, SEQ, GQA.hidden, generator=generator).to(device, dtype)
    if part in ("mlp", "shared"):
        return (x,)
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64, device=device)
    return x, dense_part(tokens, tokens, axes.cp).part


def run_part(made: Branch, inputs: tuple[Any, ...]) -> Tensors:
    """Output and gradients, those of parameters by global names, float64."""
    x = inputs[0].requires_grad_()
    out = made(x, *inputs[1:])
    slope = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).sin()
    out.backward(slope.view_as(out).to(out.dtype))
    found = {"output": out, "gradient of the input": x.grad}
    stretches = named_stretches(made)
    for name, parameter in made.named_parameters():
        for stretch in stretches[name]:
            assert parameter.grad is not None, f"{name} has a gradient"
            found[f"gradient of {stretch.name}"] = stretch.of(parameter.grad)
    return {name: tensor.detach().double() for name, tensor in found.items()}


def set_dtype(made: nn.Module, dtype: torch.dtype) -> None:
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)


def compare_part(part: str) -> Found:
    """Each tensor's error by TransformerEngine, in multiples of torch's own."""
    axes = axes_of(dp=dist.get_world_size())
    backend = make_layers("te", fused_experts=part != "experts called")
    exact = branch_of(part, axes, LayerFactory())
    init_weights([exact], 5, layers=1, init_std=0.1)
    weights = {n: p.detach().bfloat16().float() for n, p in exact.named_parameters()}
    results = []
    before = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    for maker, dtype in (
        (LayerFactory(), torch.float64), (LayerFactory(), torch.bfloat16), (backend, torch.bfloat16)
    ):  # fmt: skip
        made = branch_of(part, axes, maker)
        load_global([made], weights)
        set_dtype(made, dtype)
        if before is not None:
            torch.cuda.set_rng_state(before)
        results.append(run_part(made, inputs_of(part, axes, dtype)))
        # cuDNN's attention moves the generator on, though without dropout it draws nothing.
        if before is not None and part not in ATTENTION:
            assert torch.equal(torch.cuda.get_rng_state(), before), "a part drew random numbers"
    return ratios(*results)


def ratios(exact: Tensors, torchs: Tensors, tes: Tensors) -> Found:
    """Norms of errors of the last in multiples of those of the one before."""
    assert exact.keys() == torchs.keys() == tes.keys(), sorted(exact.keys() ^ tes.keys())
    found = {}
    for name, value in exact.items():
        # Where torch happens to be exact, as in copies, half a unit in the last place.
        own = max(float((torchs[name] - value).norm()), float(value.norm()) * 2**-10)
        found[name] = float((tes[name] - value).norm()) / own
    return found


# ---- attention alone, over ranks


def compare_core(packed: bool, heads: int = 8, kv_heads: int = 4) -> Found:
    """The same for attention of sequences over all ranks; NaN in rows of padding."""
    axes = axes_of(cp=dist.get_world_size())
    te: Any = cast("Any", make_layers("te")).te
    core = Core(te, heads, kv_heads, (64, 64), axes.cp)
    local = _tokens(axes, packed)
    part, size = local.part, axes.cp.size
    assert core.why_ours(part, torch.bfloat16) is None
    generator = torch.Generator().manual_seed(8)
    batch = 1 if packed else BATCH
    length = local.tokens.shape[1] * size
    whole = [torch.randn(batch, length, n, 64, generator=generator).bfloat16()
             for n in (heads, kv_heads, kv_heads, heads)]  # fmt: skip
    if packed:
        mine = [t[:, part.plan.rows.cpu()] for t in whole]
        assert part.plan.valid is not None
        padding = ~part.plan.valid.cpu()
        for tensor in mine[:3]:
            tensor[:, padding] = torch.nan
    else:
        mine = [split(t, 1, size, axes.cp.rank) for t in whole]
    q, k, v, slope = (t.to(here().torch_device) for t in mine)

    def ours(*qkv: torch.Tensor) -> torch.Tensor:
        return causal_attention(*qkv, plan=part.plan, axis=part.cp)

    def theirs(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv
        out: torch.Tensor = core(q, k, v, part)
        return cast("torch.Tensor", out.unflatten(-1, (heads, -1)))

    cases: list[tuple[Callable[..., torch.Tensor], torch.dtype]] = [
        (ours, torch.float64), (ours, torch.bfloat16), (theirs, torch.bfloat16),
    ]  # fmt: skip
    results = []
    for attend, dtype in cases:
        qkv = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
        out = attend(*qkv)
        out.backward(slope.to(dtype))
        grads = {f"gradient of {n}": t.grad for n, t in zip("qkv", qkv, strict=True)}
        found = {"output": out, **grads}
        results.append({n: cast("torch.Tensor", t).detach().double() for n, t in found.items()})
    return ratios(*results)


def _tokens(axes: Axes, packed: bool) -> LocalTokens:
    device = here().torch_device
    if not packed:
        tokens = torch.zeros(BATCH, 4 * SEQ, dtype=torch.int64, device=device)
        return dense_part(tokens, tokens, axes.cp)
    multiple = 2 * axes.cp.size
    lengths = (100, 3, 211, 64, 1)
    documents = [Document(torch.arange(n), torch.arange(n)) for n in lengths]
    capacity = Capacity(tokens=512, slots=8, multiple=multiple)
    return packed_part(pack(documents, capacity).to(device), axes.cp, 1.0)


# ---- fused experts whose layers are units


def compare_sharded(mode: str) -> Found | str:
    """The same for experts whose layers FSDP gathers; "bypass" leaves the hooks out."""
    axes = axes_of(dp=dist.get_world_size())
    backend = make_layers("te", fused_experts=mode != "called")
    exact = branch_of("experts fused", axes, LayerFactory())
    init_weights([exact], 5, layers=1, init_std=0.1)
    weights = {n: p.detach().bfloat16().float() for n, p in exact.named_parameters()}
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        made = branch_of("experts fused", axes, LayerFactory())
        load_global([made], weights)
        set_dtype(made, dtype)
        results.append(run_part(made, inputs_of("experts fused", axes, dtype)))
    model = branch_of("experts fused", axes, backend)
    load_global([model], weights)
    experts = cast("FusedExperts", model.part)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    shard = functools.partial(fully_shard, mesh=axes.dense_mesh, mp_policy=policy)
    for unit in (experts.gate_up, experts.down):
        shard(unit, reshard_after_forward=True)
    shard(model)
    if mode == "bypass":
        experts.forward = experts._run  # type: ignore[method-assign]
    try:
        _train_step(model, axes)
        cast("Any", model).zero_main_grads()
        found = _train_step(model, axes)  # weights are not where they were any more
    except Exception as error:  # noqa: BLE001  (what a bypass leads to is the result)
        return f"{type(error).__name__}: {error}"
    return ratios(results[0], results[1], found)


def _train_step(model: nn.Module, axes: Axes) -> Tensors:
    x, groups = inputs_of("experts fused", axes, torch.bfloat16)
    x = x.requires_grad_()
    out = model(x, groups)
    slope = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).sin()
    out.backward(slope.view_as(out).to(out.dtype))
    found = {"output": out, "gradient of the input": x.grad}
    found |= {f"gradient of {n}": grad for n, grad in gather_global_grads([model], axes).items()}
    return {name: tensor.detach().to(out.device).double() for name, tensor in found.items()}


# ---- fp8


def compare_fp8(
    fp8: str, problem: Problem, parallel: ParallelConfig, routes: Routes | None
) -> dict[str, Any]:
    """Gradients in fp8 against the same in bf16, and what delayed scaling does not agree on.

    Weights stay: later steps only let delayed scaling know how large tensors are.
    """
    layout = parity_programs.Layout(parallel, dtype="bf16", backend="te", device=here().kind)
    place = parity_programs.Place.of(layout)
    wide, _ = _gradients("none", problem, layout, routes, place)
    narrow, stages = _gradients(fp8, problem, layout, routes, place)
    errors = {
        name: float((narrow[name] - grad).double().norm() / grad.double().norm())
        for name, grad in wide.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    both = [torch.cat([g.flatten().double() for g in grads.values()]) for grads in (narrow, wide)]
    return {
        "all": float((both[0] - both[1]).norm() / both[1].norm()),
        "worst": (worst, errors[worst]),
        "same": [name for name, error in errors.items() if "layers" in name and not error],
        "differing": _differing_scales(stages, place.axes) if fp8 == "delayed" else 0,
    }


def forget_dead_models() -> None:
    """Else TransformerEngine goes on to reduce their amaxes, over groups that are gone."""
    prefer_cudnn_of_torch()
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def _gradients(
    fp8: str, problem: Problem, layout: Any, routes: Routes | None, place: Any
) -> tuple[Tensors, list[DecoderStage]]:
    """Of the last of some steps, by global names, on the CPU."""
    axes, device, config = place.axes, place.device.torch_device, problem.model
    backend = make_layers("te", fp8=fp8)
    forget_dead_models()
    streams = parity_programs.streams_of(axes, device)
    stages = make_stages(config, axes, backend, streams, chunks=layout.parallel.pp_chunks)
    load_global(stages, parity_programs.global_weights(problem))
    for stage in stages:
        how = parity_programs.sharding_of(layout, torch.bfloat16)
        shard_stage(stage.to(device), axes, **how)
        stage.set_loss_scale(1 / problem.batch.number)
    shares = parity_programs.make_shares(problem, layout, place)
    tp = axes.tp if axes.tp.cuts_sequence else None
    rows, time = shares[0].numbers.shape
    shape = (rows, time // (tp.size if tp else 1), config.hidden)
    spec = TensorSpec(shape, torch.bfloat16)
    pipeline = Pipeline(stages, axes.pp, spec, device, num_slots=len(shares))
    for _ in range(3 if fp8 == "delayed" else 1):
        for stage in stages:
            cast("Any", stage).zero_main_grads()
        parity_programs.put_tapes(stages, routes, shares, tp, config.experts)
        pipeline.forward_backward([
            Microbatch(share.local.tokens, {"part": share.local.part}) for share in shares
        ])  # fmt: skip
    return gather_global_grads(stages, axes), stages


def _differing_scales(stages: list[DecoderStage], axes: Axes) -> int:
    """Scales of TransformerEngine's modules that differ between the ranks of tp and cp."""
    scales = [
        module.fp8_meta[key].scale
        for stage in stages
        for module in cast("Any", stage).modules()
        for key in ("scaling_fwd", "scaling_bwd")
        if key in getattr(module, "fp8_meta", {})
    ]
    mine = torch.cat(scales)
    assert (mine != 1).any(), "delayed scaling has seen values"
    differing = 0
    for axis in (axes.tp, axes.cp):
        if axis.size > 1:
            everyone = [torch.empty_like(mine) for _ in range(axis.size)]
            dist.all_gather(everyone, mine, group=axis.group)
            differing += sum(int((other != mine).sum()) for other in everyone)
    return differing


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)

ALIKE = 8.0
"""Errors of kernels that round a few times as often as torch's; what is wrong errs as hundreds."""


@pytest.mark.gpu(1)
@pytest.mark.parametrize("part", PARTS)
def test_parts_err_as_torchs(part: str, gpu_ranks: RankPool) -> None:
    """Outputs and gradients of each part, by global names; none of them draws random numbers."""
    (found,) = gpu_ranks.run(compare_part, part, world_size=1)
    assert {name: error for name, error in found.items() if not error < ALIKE} == {}


@pytest.mark.gpu(4)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_over_ranks_errs_as_ours(packed: bool, gpu_ranks: RankPool) -> None:
    """Context parallel over four ranks in our order of chunks, documents packed and padded."""
    for found in gpu_ranks.run(compare_core, packed, world_size=4):
        assert {name: error for name, error in found.items() if not error < ALIKE} == {}


@pytest.mark.gpu(4)
@pytest.mark.parametrize("mode", ["fused", "called"])
def test_sharded_experts_err_as_whole_ones(mode: str, gpu_ranks: RankPool) -> None:
    """Layers of experts as FSDP units, by one operator over both or called one by one."""
    for found in gpu_ranks.run(compare_sharded, mode, world_size=4):
        assert isinstance(found, dict), found
        assert {name: error for name, error in found.items() if not error < ALIKE} == {}


@pytest.mark.gpu(4)
def test_bypassed_hooks_show(gpu_ranks: RankPool) -> None:
    """Operators that take weights without the hooks never give the right result silently."""
    for found in gpu_ranks.run(compare_sharded, "bypass", world_size=4):
        assert isinstance(found, str) or not max(found.values()) < ALIKE


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("fp8", "preset", "degrees"),
    [
        ("delayed", "dense_tiny", {"tp": 2, "dp": 2, "sequence_parallel": True}),
        ("delayed", "dense_tiny", {"tp": 2, "cp": 2}),
        ("current", "moe_tiny", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}),
        ("block", "moe_tiny", {"dp": 4, "ep": 4}),
    ],
)
def test_fp8_gradients_are_near(
    fp8: str, preset: str, degrees: dict[str, Any], gpu_ranks: RankPool
) -> None:
    """Each gradient as in bf16 up to what three bits of mantissa leave, and not the very same."""
    parallel = ParallelConfig(**degrees)
    problem = problem_of(preset, packs_of(parallel))
    _, routes = reference(problem)
    for found in gpu_ranks.run(compare_fp8, fp8, problem, parallel, routes or None, world_size=4):
        # Rounding to e5m2 and e4m3 errs by up to 1/8 and 1/16 of a number, more where gradients
        # cancel; a missing or doubled sum by half or the whole of a tensor.
        assert found["all"] < 0.3, found
        assert found["worst"][1] < 0.7, found["worst"]
        assert found["same"] == [], "computed in bf16"
        assert found["differing"] == 0, "scales of the ranks that hold one tensor"
