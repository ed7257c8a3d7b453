"""The decoder on one process: the formulas, causality, padding, recomputation, first weights."""

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.config import RECOMPUTE, ConfigError, ModelConfig, model_from_preset
from fsdp_core.model.batch import Capacity, Document, pack, packed_part
from fsdp_core.model.decoder import DecoderStage, make_stages
from fsdp_core.model.layers import LayerFactory, RopeTable
from fsdp_core.model.sharding import init_weights
from fsdp_core.parallel.rng import RandomStreams
from tests.dist.parity_programs import single_axes
from tests.support.dense_parts import dense_part

CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


def build(
    config: ModelConfig, seed: int = 3, init_std: float | None = 0.15, recompute: str = "none"
) -> DecoderStage:
    """The whole model on one process; without `init_std` with the configuration's."""
    axes = single_axes()
    streams = RandomStreams(0, (axes.pp, axes.dp_outer, axes.dp, axes.cp, axes.tp), CPU)
    model = DecoderStage(config, axes, LayerFactory(), streams, recompute=recompute)
    init_weights([model], seed, layers=config.layers, init_std=init_std or config.init_std)
    return model


def build_double(config: ModelConfig, seed: int = 3) -> DecoderStage:
    model = build(config, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
        if parameter.dim() < 2:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def loss_of(model: DecoderStage, ids: torch.Tensor) -> torch.Tensor:
    local = dense_part(ids[:, :-1], ids[:, 1:], model.axes.cp)
    result: torch.Tensor = model(local.tokens, local.part)
    return result


# ---- the same, written out


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE of [B, T, N, D] by complex numbers, angles rounded to float32 as the table's are."""
    width = x.shape[-1]
    rates = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), rates)
    turns = torch.complex(angles.cos().float().double(), angles.sin().float().double())
    turned = torch.complex(*x.chunk(2, -1)) * turns[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def gqa(x: torch.Tensor, w: Weights, c: ModelConfig) -> torch.Tensor:
    q, k, v = (F.linear(x, w[f"{n}.weight"]).unflatten(-1, (-1, c.head_dim)) for n in
               ("wq", "wk", "wv"))  # fmt: skip
    if c.qk_norm:
        q = norm(q, w["q_norm.weight"], c.norm_eps)
        k = norm(k, w["k_norm.weight"], c.norm_eps)
    q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(out.transpose(1, 2).flatten(2), w["wo.weight"])


def mla(x: torch.Tensor, w: Weights, c: ModelConfig) -> torch.Tensor:
    query = x
    if c.q_lora_rank is not None:
        query = norm(F.linear(x, w["wq_down.weight"]), w["q_norm.weight"], c.norm_eps)
    q = F.linear(query, w["wq.weight"]).unflatten(-1, (c.heads, -1))
    latent = norm(F.linear(x, w["wkv_down.weight"]), w["kv_norm.weight"], c.norm_eps)
    k = F.linear(latent, w["wk.weight"]).unflatten(-1, (c.heads, -1))
    v = F.linear(latent, w["wv.weight"]).unflatten(-1, (c.heads, -1))
    nope = c.qk_nope_head_dim
    turned = rotate(F.linear(x, w["wk_rope.weight"])[:, :, None], c.rope_theta)
    k = torch.cat((k, turned.expand(-1, -1, c.heads, -1)), -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], c.rope_theta)), -1)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.transpose(1, 2).flatten(2), w["wo.weight"])


def swiglu(x: torch.Tensor, w: Weights) -> torch.Tensor:
    inner = F.silu(F.linear(x, w["gate.weight"])) * F.linear(x, w["up.weight"])
    return F.linear(inner, w["down.weight"])


def moe(x: torch.Tensor, w: Weights, c: ModelConfig) -> torch.Tensor:
    logits = F.linear(x, w["router.weight"])
    scores = logits.softmax(-1) if c.score == "softmax" else logits.sigmoid()
    top, chosen = scores.topk(c.top_k, -1)
    if c.normalise_top_k:
        top = top / top.sum(-1, keepdim=True)
    weights = torch.zeros_like(scores).scatter(-1, chosen, top * c.route_scale)
    out = torch.zeros_like(x)
    for expert in range(c.experts):
        mine = {f"{n}.weight": w[f"experts.{n}.weight"][expert] for n in ("gate", "up", "down")}
        out = out + weights[..., expert, None] * swiglu(x, mine)
    return out + swiglu(x, within(w, "shared.")) if c.shared_expert_ffn else out


def within(w: Weights, prefix: str) -> Weights:
    return {n.removeprefix(prefix): t for n, t in w.items() if n.startswith(prefix)}


def plain_loss(w: Weights, ids: torch.Tensor, c: ModelConfig) -> torch.Tensor:
    x = F.embedding(ids[:, :-1], w["embedding.weight"])
    for number in range(c.layers):
        attn, mlp = within(w, f"layers.{number}.attn."), within(w, f"layers.{number}.mlp.")
        attention = mla if c.attention == "mla" else gqa
        normed = norm(x, attn["norm.weight"], c.norm_eps)
        x = x + attention(normed, within(attn, "attention."), c)
        normed = norm(x, mlp["norm.weight"], c.norm_eps)
        if c.has_experts(number):
            x = x + moe(normed, within(mlp, "moe."), c)
        else:
            x = x + swiglu(normed, within(mlp, "mlp."))
    logits = F.linear(norm(x, w["norm.weight"], c.norm_eps), w["head.weight"])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


CONFIGS = {
    "gqa": model_from_preset("dense_tiny", {"seq": 16}),
    "qwen": model_from_preset("dense_tiny", {"seq": 16, "qk_norm": True, "head_dim": 24}),
    "moe": model_from_preset("moe_tiny", {"seq": 16, "aux_loss": 0.0, "z_loss": 0.0}),
    "mla": model_from_preset("mla_moe_tiny", {"seq": 16, "aux_loss": 0.0}),
    "mla without q_lora": model_from_preset(
        "mla_moe_tiny", {"seq": 16, "aux_loss": 0.0, "q_lora_rank": None, "v_head_dim": 20}
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_the_formulas(name: str) -> None:
    """Loss and every gradient agree with the formulas to float64's roundings."""
    config = CONFIGS[name]
    model = build_double(config)
    ids = torch.randint(0, 256, (3, 17), generator=torch.Generator().manual_seed(0))
    loss = loss_of(model, ids)
    loss.backward()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    expected = plain_loss(weights, ids, config)
    expected.backward()
    # Some 1e3 roundings of 1e-16 each, of parts that partly cancel.
    assert abs(loss.item() - expected.item()) < 1e-12
    for parameter_name, parameter in model.named_parameters():
        grad = weights[parameter_name].grad
        assert grad is not None
        assert parameter.grad is not None
        error = float((parameter.grad - grad).norm() / grad.norm())
        assert error < 1e-12, parameter_name


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    """A model with more layers has the same weights in those it shares, but for their scale."""
    small = dict(build_double(CONFIGS["moe"]).named_parameters())
    large = dict(
        build_double(model_from_preset("moe_tiny", {"seq": 16, "layers": 3})).named_parameters()
    )
    for name in small:
        if small[name].dim() > 1 and "down" not in name and "wo" not in name:
            assert torch.equal(small[name], large[name]), name
    assert not torch.equal(
        small["layers.0.mlp.moe.experts.gate.weight"][0],
        small["layers.0.mlp.moe.experts.gate.weight"][1],
    )


def test_rope_table_stays_where_it_is() -> None:
    """Forward passes make no table of their own: every layer reads the model's one."""
    model = build_double(CONFIGS["mla"])
    tables = {name for name, _ in model.named_buffers() if name.endswith((".cos", ".sin"))}
    assert tables == {"rope.cos", "rope.sin"}
    before = model.rope.cos.data_ptr()
    ids = torch.zeros(1, 9, dtype=torch.int64)
    loss_of(model, ids)
    assert model.rope.cos.data_ptr() == before
    assert not any(name.startswith("rope") for name in model.state_dict())


def test_rope_refuses_positions_past_its_table() -> None:
    """A token past the longest sequence is an error, not another token's rotation."""
    table = RopeTable(4, 8, 10_000.0)
    with pytest.raises(IndexError):
        table(torch.ones(1, 1, 1, 8), torch.tensor([4]))


def test_sequences_without_positions_are_refused() -> None:
    """As many tokens as `seq` are taken, two more are refused before anything is computed."""
    model = build_double(model_from_preset("dense_tiny", {"seq": 8}))
    ids = torch.zeros(1, 11, dtype=torch.int64)
    loss_of(model, ids[:, :9])
    with pytest.raises(ValueError, match=r"at most 8 tokens \(seq\), got 10"):
        loss_of(model, ids)


PAD = 0
"""The token that padding has; no document here has it."""
LENGTHS = (5, 1, 8)


def build_padded(preset: str, padding: float) -> DecoderStage:
    model = build(model_from_preset(preset, {}))
    with torch.no_grad():
        assert model.embedding is not None
        cast("Any", model.embedding).weight[PAD] = padding
    return model


def step(model: DecoderStage, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of a pack of `tokens`, with its gradients, and what each layer makes of padding."""
    documents = [Document(torch.arange(n) + 1, torch.arange(n) + 2) for n in LENGTHS]
    batch = pack(documents, Capacity(tokens=tokens, slots=5, multiple=4))
    local = packed_part(batch, model.axes.cp, 1.0 / sum(LENGTHS))
    assert local.part.plan.valid is not None
    padding, made = ~local.part.plan.valid, list[torch.Tensor]()
    for layer in model.numbered_layers.values():
        layer.register_forward_hook(lambda _, args, out: made.append(out.detach()[:, padding]))
    loss = model(local.tokens, local.part)
    loss.backward()
    return loss.detach(), made


@pytest.mark.parametrize("preset", ["dense_tiny", "moe_tiny", "mla_moe_tiny"])
@pytest.mark.parametrize("tokens", [20, 32])
def test_what_padding_holds_is_nowhere(preset: str, tokens: int) -> None:
    """With NaN in it, between documents and in the tail, loss and gradients have the same bits."""
    sides = [build_padded(preset, padding) for padding in (1.0, math.nan)]
    (loss, _), (other, made) = (step(model, tokens) for model in sides)
    assert torch.equal(loss, other)
    assert len(made) == len(sides[1].numbered_layers)
    for rows in made:
        assert rows.numel()
        assert not rows.any()
    for (name, ours), theirs in zip(
        sides[0].named_parameters(), sides[1].parameters(), strict=True
    ):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name
        assert ours.grad.isfinite().all()


def train(model: DecoderStage) -> tuple[list[torch.Tensor], int]:
    """Loss, gradients and random states of two passes; and bytes that the last one kept."""
    ids = torch.randint(250, (2, 17), generator=torch.Generator().manual_seed(1))
    local, kept, found = dense_part(ids[:, :-1], ids[:, 1:], model.axes.cp), [0], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[0] += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
        return tensor

    for _ in range(2):
        kept[0] = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(local.tokens, local.part)
        loss.backward()
        found.append(loss.detach())
    grads = [cast("torch.Tensor", p.grad) for p in model.parameters()]
    counts = [router.slots_per_expert for router in model.routers.values()]
    return [*found, *grads, *counts], kept[0]


@pytest.mark.parametrize("preset", ["dense_tiny_dropout", "moe_tiny"])
def test_the_bits_are_those_of_kept_activations(preset: str) -> None:
    """Dropout draws the same numbers again, loads are counted once, and less is kept."""
    config = model_from_preset(preset)
    found, kept = train(build(config))
    for recompute, most in (("attn", 0.9), ("full", 0.5)):
        again, bytes_kept = train(build(config, recompute=recompute))
        assert all(map(torch.equal, again, found))
        assert bytes_kept < most * kept, recompute


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_what_is_computed_again(recompute: str) -> None:
    """Attention alone, or the whole layer; nothing without gradients, of which nobody warns."""
    calls = {"none": (1, 1), "attn": (2, 1), "full": (2, 2)}[recompute.partition("_")[0]]
    model = build(model_from_preset("dense_tiny"), recompute=recompute)
    layer, seen = model.numbered_layers["1"], {"attn": 0, "mlp": 0}
    for name, module in (("attn", layer.attn.norm), ("mlp", layer.mlp.norm)):
        module.register_forward_hook(lambda *_, name=name: seen.update({name: seen[name] + 1}))
    ids = torch.zeros(1, 9, dtype=torch.int64)
    local = dense_part(ids[:, :-1], ids[:, 1:], model.axes.cp)
    model(local.tokens, local.part).backward()
    assert (seen["attn"], seen["mlp"]) == calls
    with torch.no_grad():
        model(local.tokens, local.part)
    assert (seen["attn"], seen["mlp"]) == (calls[0] + 1, calls[1] + 1)


SHAPES = {"vocab_size": 61, "hidden": 32, "ffn": 48, "seq": 20}
DENSE = model_from_preset("dense_tiny", SHAPES)


def tokens(seed: int = 0, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, DENSE.vocab_size, (rows, DENSE.seq), generator=generator)


def logits(model: DecoderStage, inputs: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    assert model.head is not None
    hook = model.head.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    loss_of(model, F.pad(inputs, (0, 1)))
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [1, 10, DENSE.seq - 1])
def test_causal_to_the_bit(position: int, dtype: torch.dtype) -> None:
    """Changing a token changes its own logits, and not one bit of any earlier one."""
    model = build(DENSE).to(dtype)
    before = tokens()
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % DENSE.vocab_size
    first, second = logits(model, before), logits(model, after)
    assert torch.equal(first[:, :position], second[:, :position])
    for later in range(position, DENSE.seq):
        assert not torch.equal(first[:, later], second[:, later])


def test_dropout_only_in_training() -> None:
    """Dropout draws anew at each training forward, and is off in evaluation."""
    model = build(model_from_preset("dense_tiny", SHAPES | {"dropout": 0.5}))
    inputs = tokens()
    assert not torch.equal(logits(model, inputs), logits(model, inputs))
    model.eval()
    assert torch.equal(logits(model, inputs), logits(model, inputs))


def test_initial_bits_depend_on_the_seed_alone() -> None:
    """Same seed, same bits, whatever the default generator did; another seed, other bits."""
    torch.manual_seed(1)
    first = build(DENSE, 9)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second, other = build(DENSE, 9), build(DENSE, 10)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (a.dim() < 2), name


def test_initial_scales() -> None:
    """Matrices have init_std, those into the residual stream less by sqrt(2 layers), norms one."""
    config = ModelConfig(hidden=256, layers=8, heads=4, kv_heads=4, ffn=256, init_std=0.5)
    for name, parameter in build(config, init_std=None).named_parameters():
        if parameter.dim() < 2:
            assert (parameter == 1).all(), name
            continue
        residual = name.endswith(("wo.weight", "down.weight"))
        expected = 0.5 / 4 if residual else 0.5
        # A sample deviation of n >= 65536 draws is off by 1/sqrt(2n) = 0.3 %; 2 % is seven sigma.
        assert abs(parameter.std().item() / expected - 1) < 0.02, name


# ---- stages


@pytest.mark.parametrize(
    ("preset", "sizes", "rule"),
    [
        ("dense_tiny", {"tp": 3}, "tp_divides_heads"),
        ("dense_tiny", {"pp": 99}, "stages_have_layers"),
        ("moe_tiny", {"dp": 3, "ep": 3}, "ep_divides_experts"),
        ("moe_tiny", {"tp": 2}, "experts_under_tp_need_sequence_parallel"),
    ],
)
def test_axes_obey_the_rules_of_layouts(preset: str, sizes: dict[str, int], rule: str) -> None:
    """Also of no configuration: experts would get a token from every rank of tp, silently."""
    axes = single_axes()
    axes = replace(axes, **{n: replace(getattr(axes, n), size=s) for n, s in sizes.items()})
    streams = RandomStreams(0, (axes.pp,), CPU)
    with pytest.raises(ConfigError) as error:
        make_stages(model_from_preset(preset), axes, LayerFactory(), streams)
    assert error.value.rule == rule
