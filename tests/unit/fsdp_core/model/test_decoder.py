"""The decoder that is not cut, against formulas written out with torch's own functions."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.config import ModelConfig, model_from_preset
from fsdp_core.model.attention import RopeTable
from fsdp_core.model.batch import dense_part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.weights import init_weights
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.rng import RandomStreams
from tests.support.global_weights import load_global

CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


def build(config: ModelConfig, seed: int = 3, init_std: float = 0.15) -> DecoderStage:
    """The whole model in float64 on one process."""
    nobody = cast("Any", None)
    names = ("tp", "cp", "pp", "dp", "dp_outer", "ep", "etp", "edp")
    one = {name: Axis(name, 1, 0, nobody) for name in names}
    axes = Axes(**one, dense_mesh=nobody, expert_mesh=nobody, sequence_parallel=False)
    streams = RandomStreams(0, (axes.pp, axes.dp_outer, axes.dp, axes.cp, axes.tp), CPU)
    model = DecoderStage(config, axes, LayerFactory(), streams)
    init_weights([model], seed, layers=config.layers, init_std=init_std)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
        if parameter.dim() < 2:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def loss_of(model: DecoderStage, ids: torch.Tensor) -> torch.Tensor:
    """The model's loss of rows of ids [B, T + 1]."""
    local = dense_part(ids[:, :-1], ids[:, 1:], model.axes.cp)
    result: torch.Tensor = model(local.tokens, local.part)
    return result


# ---- the same, written out


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm."""
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
    """Grouped-query attention of normed x."""
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
    """Latent attention of normed x."""
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
    """A dense feed-forward."""
    inner = F.silu(F.linear(x, w["gate.weight"])) * F.linear(x, w["up.weight"])
    return F.linear(inner, w["down.weight"])


def moe(x: torch.Tensor, w: Weights, c: ModelConfig) -> torch.Tensor:
    """Every expert on every token, weighted; and shared ones."""
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
    """Weights of a module."""
    return {n.removeprefix(prefix): t for n, t in w.items() if n.startswith(prefix)}


def plain_loss(w: Weights, ids: torch.Tensor, c: ModelConfig) -> torch.Tensor:
    """Mean cross entropy."""
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
    model = build(config)
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
    small = dict(build(CONFIGS["moe"]).named_parameters())
    large = dict(build(model_from_preset("moe_tiny", {"seq": 16, "layers": 3})).named_parameters())
    for name in small:
        if small[name].dim() > 1 and "down" not in name and "wo" not in name:
            assert torch.equal(small[name], large[name]), name
    assert not torch.equal(
        small["layers.0.mlp.moe.experts.gate.weight"][0],
        small["layers.0.mlp.moe.experts.gate.weight"][1],
    )


def test_load_refuses_weights_of_another_model() -> None:
    """A missing name and another shape are errors that name the weight."""
    model = build(CONFIGS["gqa"])
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"a weight for head\.weight"):
        load_global([model], {n: w for n, w in weights.items() if n != "head.weight"})
    with pytest.raises(ValueError, match=r"head\.weight of shape \[256, 64\], got \[256, 63\]"):
        load_global([model], weights | {"head.weight": torch.zeros(256, 63)})


def test_rope_table_stays_where_it_is() -> None:
    """Forward passes make no table of their own: every layer reads the model's one."""
    model = build(CONFIGS["mla"])
    tables = {name for name, _ in model.named_buffers() if name.endswith((".cos", ".sin"))}
    assert tables == {"rope.cos", "rope.sin"}
    before = model.rope.cos.data_ptr()
    ids = torch.zeros(1, 9, dtype=torch.int64)
    loss_of(model, ids)
    assert model.rope.cos.data_ptr() == before
    assert not any("rope.cos" in name for name in model.state_dict())


def test_rope_refuses_positions_past_its_table() -> None:
    """A token past the longest sequence is an error, not another token's rotation."""
    table = RopeTable(4, 8, 10_000.0)
    with pytest.raises(IndexError):
        table(torch.ones(1, 1, 1, 8), torch.tensor([4]))


def test_sequences_without_positions_are_refused() -> None:
    """As many tokens as `seq` are taken, two more are refused before anything is computed."""
    config = model_from_preset("dense_tiny", {"seq": 8})
    model = build(config)
    ids = torch.zeros(1, 11, dtype=torch.int64)
    loss_of(model, ids[:, :9])
    match = r"at most 8 tokens, as many as the model has positions for \(seq\), got 10"
    with pytest.raises(ValueError, match=match):
        loss_of(model, ids)
