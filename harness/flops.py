"""Model FLOPs of a training step: what the mathematics needs, not what the hardware did.

The convention is that of "model FLOPs utilization" (Chowdhery et al., PaLM, 2022, appendix B): a
multiply-add is 2 FLOPs; the backward pass costs twice the forward pass; what is computed again
(recompute) does not count; norms, activations, RoPE, softmax and the embedding's lookup are left
out. One difference: a causal mask is counted as what it leaves, as Megatron-LM does, so that a
sequence of T tokens has T (T + 1) / 2 pairs of query and key, not T^2.

    forward, a token    2 x weights of every matrix that the token meets
                          attention   GQA: H D (2 N + 2 K); MLA: each of its projections
                          layer       3 H ffn, or H E (router) + 3 H (top_k expert_ffn + shared)
                          head        H V
    forward, a pair     2 N (D + Dv): N heads, queries and keys D wide, values Dv
    step                3 x tokens x (matrices + layers x N x pairs a token)

Tokens that an expert drops for want of capacity count as if it had taken them.
"""

from collections.abc import Mapping
from typing import Any

BACKWARD = 2
"""Cost of a backward pass in forward passes."""


def step_flops(config: Mapping[str, Any]) -> float | None:
    """FLOPs of one step of all ranks together.

    Args:
        config: a plain `TrainConfig`.

    Returns:
        None for packed documents (`dynamic_cp`): their pairs depend on the data.
    """
    model, parallel = config["model"], config["parallel"]
    if parallel["dynamic_cp"]:
        return None
    replicas = parallel["dp_outer"] * parallel["dp"]
    sequences = config["microbatches"] * config["micro_batch_size"] * replicas
    return float((1 + BACKWARD) * sequences * sequence_flops(model))


def sequence_flops(model: Mapping[str, Any]) -> int:
    """FLOPs of the forward pass of one sequence of `seq` tokens.

    Args:
        model: a plain `ModelConfig`.
    """
    seq = model["seq"]
    pairs = seq * (seq + 1) // 2
    value = model["v_head_dim"] if model["attention"] == "mla" else model["head_dim"]
    attention = 2 * model["heads"] * (model["head_dim"] + value) * pairs * model["layers"]
    return int(2 * seq * matrix_weights(model) + attention)


def matrix_weights(model: Mapping[str, Any]) -> int:
    """Elements of all matrices that one token is multiplied by."""
    hidden, layers = model["hidden"], model["layers"]
    dense = model["first_dense_layers"] if model["experts"] else layers
    width = model["top_k"] * model["expert_ffn"] + model["shared_expert_ffn"]
    routed = hidden * (model["experts"] + 3 * width)
    return int(
        layers * _attention_weights(model)
        + dense * 3 * hidden * model["ffn"]
        + (layers - dense) * routed
        + hidden * model["vocab_size"]
    )


def _attention_weights(model: Mapping[str, Any]) -> int:
    hidden, heads, head = model["hidden"], model["heads"], model["head_dim"]
    if model["attention"] == "gqa":
        return int(hidden * head * 2 * (heads + model["kv_heads"]))
    latent, rope, value = model["kv_lora_rank"], model["qk_rope_head_dim"], model["v_head_dim"]
    rank = model["q_lora_rank"]
    query = hidden * heads * head if rank is None else rank * (hidden + heads * head)
    keys = hidden * (latent + rope) + latent * heads * (model["qk_nope_head_dim"] + value)
    return int(query + keys + heads * value * hidden)
