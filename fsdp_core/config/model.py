"""Shapes of the decoder: attention (GQA or MLA), feed-forward (dense, or experts), presets.

    attention: gqa    N query heads, K key-value heads, all `head_dim` wide, RoPE on all of it
    attention: mla    keys and values come from one latent of `kv_lora_rank`, queries from the
                      hidden state or a latent of `q_lora_rank`; a query or key head is
                      `qk_nope_head_dim` without position and `qk_rope_head_dim` with RoPE; a value
                      head is `v_head_dim` (DeepSeek-V2, 2024)
    experts: 0        every layer has a SwiGLU of width `ffn`
    experts: E        the first `first_dense_layers` have it, every other layer has E experts of
                      width `expert_ffn`, `top_k` a token, and shared ones of width
                      `shared_expert_ffn` for every token

Keys that another key makes meaningless are refused unless they are left alone.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_core.config.rule import (
    ConfigError,
    Rule,
    bools,
    integers,
    keep_defaults,
    numbers,
    obey,
    refuse,
    words,
)

ATTENTIONS = ("gqa", "mla")
SCORES = ("softmax", "sigmoid")
DISPATCHERS = ("all_to_all", "all_gather")
DROPS = ("position", "probs")

_MLA_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MLA_KEYS = (*_MLA_WIDTHS, "q_lora_rank")
_EXPERT_KEYS = (
    "top_k", "expert_ffn", "shared_expert_ffn", "first_dense_layers", "score", "normalise_top_k",
    "route_scale", "aux_loss", "z_loss", "expert_bias", "expert_bias_rate", "capacity_factor",
    "drop", "dispatcher",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes of a pre-norm decoder. `seq` is the training sequence length in tokens.

    head_dim: width of a query or key head. 0 stands for hidden / heads (GQA) or qk_nope_head_dim +
        qk_rope_head_dim (MLA), and is replaced by it: it is never 0 to read, and
        `dataclasses.replace` keeps the width unless told 0 again.
    ffn: width of the dense feed-forward.
    qk_norm: an RMSNorm on every query and key head (Qwen3); GQA only.
    q_lora_rank: width of the latent that queries come from; None: from the hidden state.
    expert_ffn: width of one expert.
    shared_expert_ffn: width of all shared experts together; 0: none.
    score: how router logits become scores, over all experts, before the top k are taken.
    normalise_top_k: the k scores of a token are divided by their sum.
    route_scale: what the scores are multiplied by in the end.
    aux_loss: coefficient of the load balancing loss; 0: none.
    z_loss: coefficient of the loss on the size of router logits; 0: none.
    expert_bias: a bias on each expert's score that only the choice of experts sees, moved by
        `expert_bias_rate` a step towards an even load.
    capacity_factor: tokens that an expert takes, in multiples of an even share, those past it
        dropped and those short of it padded; None: dropless.
    drop: which tokens are past the capacity: the last ones, or those of the smallest scores.
    dispatcher: how tokens travel to experts.
    """

    preset: str = "dense_tiny"
    vocab_size: int = 256
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    ffn: int = 160
    seq: int = 32
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    init_std: float = 0.02
    attention: str = "gqa"
    qk_norm: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0
    first_dense_layers: int = 0
    score: str = "softmax"
    normalise_top_k: bool = False
    route_scale: float = 1.0
    aux_loss: float = 0.0
    z_loss: float = 0.0
    expert_bias: bool = False
    expert_bias_rate: float = 1e-3
    capacity_factor: float | None = None
    drop: str = "position"
    dispatcher: str = "all_to_all"

    def __post_init__(self) -> None:
        integers(self, 1, "vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn", "seq")
        integers(self, 0, "head_dim", "experts", "top_k", "expert_ffn", "shared_expert_ffn",
                 "first_dense_layers", *_MLA_WIDTHS)  # fmt: skip
        if self.q_lora_rank is not None:
            integers(self, 1, "q_lora_rank")
        if self.capacity_factor is not None:
            numbers(self, "> 0", "capacity_factor")
        numbers(self, "> 0", "rope_theta", "norm_eps", "init_std", "route_scale")
        numbers(self, ">= 0", "aux_loss", "z_loss", "expert_bias_rate")
        numbers(self, "in [0, 1)", "dropout")
        bools(self, "qk_norm", "normalise_top_k", "expert_bias")
        words(self, attention=ATTENTIONS, score=SCORES, drop=DROPS, dispatcher=DISPATCHERS)
        obey(MODEL_RULES, self)
        object.__setattr__(self, "head_dim", _head_dim(self))

    @property
    def v_dim(self) -> int:
        return self.v_head_dim if self.attention == "mla" else self.head_dim

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim if self.attention == "mla" else self.head_dim

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.first_dense_layers

    @property
    def has_dense_ffn(self) -> bool:
        return self.experts == 0 or self.first_dense_layers > 0


def _head_dim(model: ModelConfig) -> int:
    if model.attention == "mla":
        return model.qk_nope_head_dim + model.qk_rope_head_dim
    return model.head_dim or model.hidden // model.heads


def _rope_turns_pairs(model: ModelConfig) -> None:
    if _rope_key(model) == "heads":
        if _head_dim(model) % 2:
            refuse(model, "heads", f"hidden/heads even (RoPE), hidden={model.hidden}")
    elif getattr(model, _rope_key(model)) % 2:
        refuse(model, _rope_key(model), "an even number (RoPE)")


def _rope_key(model: ModelConfig) -> str:
    if model.attention == "mla":
        return "qk_rope_head_dim"
    return "head_dim" if model.head_dim else "heads"


def _mla_has_widths(model: ModelConfig) -> None:
    missing = [key for key in _MLA_WIDTHS if not getattr(model, key)]
    if model.attention == "mla" and missing:
        refuse(model, missing[0], "an integer >= 1, as attention is mla")


def _mla_keys_need_mla(model: ModelConfig) -> None:
    if model.attention != "mla":
        keep_defaults(model, _MLA_KEYS, "unless attention is mla")


def _expert_keys_need_experts(model: ModelConfig) -> None:
    if not model.experts:
        keep_defaults(model, _EXPERT_KEYS, "unless experts > 0")


MODEL_RULES: tuple[Rule[ModelConfig], ...] = (
    Rule("heads_divide_hidden", "Without head_dim, heads share hidden evenly.",
         lambda m: m.attention != "mla" and not m.head_dim and m.hidden % m.heads,
         "heads", "a divisor of hidden={0.hidden}"),
    Rule("rope_turns_pairs", "What RoPE turns is of even width.", _rope_turns_pairs),
    Rule("kv_heads_divide_heads", "Each key-value head serves equally many query heads.",
         lambda m: m.heads % m.kv_heads, "kv_heads", "a divisor of heads={0.heads}"),
    Rule("mla_has_widths", "MLA is given all its widths.", _mla_has_widths),
    Rule("mla_keys_need_mla", "Keys of MLA are left alone without it: they would change nothing.",
         _mla_keys_need_mla),
    Rule("mla_has_all_kv_heads", "MLA has a key and a value for each query head.",
         lambda m: m.attention == "mla" and m.kv_heads != m.heads,
         "kv_heads", "heads={0.heads}, as attention is mla"),
    Rule("mla_decides_head_dim", "MLA's two parts make up head_dim.",
         lambda m: m.attention == "mla" and m.head_dim not in (0, _head_dim(m)),
         "head_dim", "qk_nope_head_dim + qk_rope_head_dim, or nothing"),
    Rule("qk_norm_needs_gqa", "Norms of query and key heads are of GQA.",
         lambda m: m.qk_norm and m.attention != "gqa",
         "qk_norm", "false, as MLA normalises its latents", (False,)),
    Rule("expert_keys_need_experts",
         "Keys of experts are left alone without experts: they would change nothing.",
         _expert_keys_need_experts),
    Rule("top_k_within_experts", "A token goes to 1 to E experts.",
         lambda m: m.experts and not 1 <= m.top_k <= m.experts,
         "top_k", "an integer from 1 to experts={0.experts}"),
    Rule("experts_have_width", "Experts are given a width.",
         lambda m: m.experts and not m.expert_ffn,
         "expert_ffn", "an integer >= 1, as there are experts"),
    Rule("some_layer_has_experts", "A model with experts has a layer that uses them.",
         lambda m: m.experts and m.first_dense_layers >= m.layers,
         "first_dense_layers", "less than layers={0.layers}, so that a layer has experts"),
    Rule("dropping_needs_capacity", "Dropless experts drop nothing, in no order.",
         lambda m: m.drop != "position" and m.capacity_factor is None,
         "drop", "position, as there is no capacity_factor to drop by", ("position",)),
)  # fmt: skip


_MOE_TINY: dict[str, Any] = {"experts": 8, "top_k": 2, "expert_ffn": 32}
MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "dense_tiny": {},
    "dense_tiny_dropout": {"dropout": 0.1},
    "moe_tiny": _MOE_TINY | {"normalise_top_k": True, "aux_loss": 1e-2, "z_loss": 1e-3},
    "mla_moe_tiny": _MOE_TINY | {
        "kv_heads": 4, "attention": "mla", "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "shared_expert_ffn": 32, "first_dense_layers": 1, "score": "sigmoid",
        "normalise_top_k": True, "route_scale": 2.0, "aux_loss": 1e-3, "expert_bias": True,
    },
    "dense_small": {
        "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn": 688, "seq": 128,
    },
    "dense_1b": {
        "vocab_size": 32_000, "hidden": 2048, "layers": 16, "heads": 16, "kv_heads": 8,
        "ffn": 8192, "seq": 2048,
    },
    "llama3_8b": {
        "vocab_size": 128_256, "hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8,
        "ffn": 14_336, "seq": 8192, "rope_theta": 500_000.0,
    },
    "qwen3_8b": {
        "vocab_size": 151_936, "hidden": 4096, "layers": 36, "heads": 32, "kv_heads": 8,
        "head_dim": 128, "qk_norm": True, "ffn": 12_288, "seq": 4096, "rope_theta": 1e6,
        "norm_eps": 1e-6,
    },
    "qwen3_30b_a3b": {
        "vocab_size": 151_936, "hidden": 2048, "layers": 48, "heads": 32, "kv_heads": 4,
        "head_dim": 128, "qk_norm": True, "ffn": 6144, "seq": 4096, "rope_theta": 1e6,
        "norm_eps": 1e-6, "experts": 128, "top_k": 8, "expert_ffn": 768, "normalise_top_k": True,
        "aux_loss": 1e-3,
    },
    "moonlight_16b_a3b": {
        "vocab_size": 163_840, "hidden": 2048, "layers": 27, "heads": 16, "kv_heads": 16,
        "attention": "mla", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "ffn": 11_264, "seq": 8192, "rope_theta": 50_000.0,
        "experts": 64, "top_k": 6, "expert_ffn": 1408, "shared_expert_ffn": 2816,
        "first_dense_layers": 1, "score": "sigmoid", "normalise_top_k": True,
        "route_scale": 2.446, "aux_loss": 1e-3, "expert_bias": True,
    },
}  # fmt: skip
"""The tiny ones train in seconds on a CPU and divide by every degree of 8 ranks that is used in
tests. Those named after a public model have its published shapes, to be made smaller with
overrides: `layers` first, then `hidden`, `ffn` and `expert_ffn`."""


def model_from_preset(preset: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """A preset with overriding fields (`ConfigError`: unknown names, or a rule broken)."""
    if preset not in MODEL_PRESETS:
        legal = tuple(MODEL_PRESETS)
        raise ConfigError("preset", expected="one of the legal values", got=preset, legal=legal)
    names = tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name != "preset")
    for name in overrides or {}:
        if name not in names:
            raise ConfigError(name, expected="a field of the model", got=name, legal=names)
    return ModelConfig(preset=preset, **(MODEL_PRESETS[preset] | dict(overrides or {})))
