"""Contracts of harness.checks.speed: models small enough to count by hand."""

from typing import Any

import pytest

from fsdp_core.config import TrainConfig, model_from_preset
from fsdp_core.config.parallel import ParallelConfig
from harness.checks.speed import sequence_flops, step_flops

DENSE = {
    "vocab_size": 11, "hidden": 4, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 5, "seq": 3,
}  # fmt: skip
MOE = DENSE | {
    "experts": 6, "top_k": 2, "expert_ffn": 7, "shared_expert_ffn": 3, "first_dense_layers": 1,
}  # fmt: skip
MLA = DENSE | {
    "kv_heads": 2, "attention": "mla", "q_lora_rank": 3, "kv_lora_rank": 5,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 8,
}  # fmt: skip


def plain(shape: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run of a model as records hold it."""
    return TrainConfig(model=model_from_preset("dense_tiny", shape), **changes).to_dict()


def by_hand(attention: int, widths: int, pairs: int) -> int:
    """Two layers and a head of 4 x 11, 3 tokens, 6 pairs of query and key a head."""
    tokens = 2 * 3 * (2 * attention + widths + 4 * 11)
    return tokens + 2 * 2 * pairs * 6  # two layers, two FLOPs


@pytest.mark.parametrize(
    ("shape", "forward"),
    {
        # wq 4x4, wk and wv 4x2, wo 4x4; gate, up and down 4x5 twice; 2 heads of 2 + 2 a pair
        "dense": (DENSE, by_hand(16 + 8 + 8 + 16, 2 * 3 * 20, 2 * (2 + 2))),
        # the second layer: router 4x6, two experts of 4x7 and one shared of 4x3, thrice each
        "experts": (MOE, by_hand(48, 3 * 20 + 24 + 3 * (2 * 28 + 12), 8)),
        # down 4x3, up 3x(2x6), latents 4x5 and 4x2, keys 5x(2x4), values 5x(2x8), out 16x4
        "latent attention": (MLA, by_hand(12 + 36 + 20 + 8 + 40 + 80 + 64, 120, 2 * (6 + 8))),
        # queries from the hidden state: 4x(2x6) in place of both
        "no query latent": (MLA | {"q_lora_rank": None},
                            by_hand(48 + 20 + 8 + 40 + 80 + 64, 120, 28)),
    }.values(),
)  # fmt: skip
def test_forward_is_what_hand_counting_gives(shape: dict[str, Any], forward: int) -> None:
    """Every matrix that a token meets twice its weights, and the causal pairs of every head."""
    assert sequence_flops(plain(shape)["model"]) == forward


def test_a_step_is_three_forwards_of_every_sequence_of_all_replicas() -> None:
    """tp, cp and pp share the work of a sequence; dp, dp_outer and microbatches multiply it."""
    parallel = ParallelConfig(dp=2, dp_outer=2, tp=2)
    shape = DENSE | {"kv_heads": 2, "ffn": 6, "vocab_size": 12}
    config = plain(shape, parallel=parallel, microbatches=5, micro_batch_size=3)
    assert step_flops(config) == 3 * (5 * 3 * 4) * sequence_flops(config["model"])


def test_packed_documents_have_no_count() -> None:
    """Their pairs depend on the data: no number is better than a wrong one."""
    config = plain(DENSE)
    config["parallel"]["dynamic_cp"] = [1, 2]
    assert step_flops(config) is None


def test_six_times_the_parameters_where_attention_is_small() -> None:
    """An 8B model at 1 token a sequence: 6 a token for every weight but the embedding's."""
    model = plain({}, steps=1)["model"] | model_from_preset("llama3_8b", {"seq": 1}).__dict__
    assert sequence_flops(model) * 3 / 6 == pytest.approx(8.03e9 - 128_256 * 4096, rel=0.01)
