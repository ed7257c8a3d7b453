"""The decoder on one process: causal to the bit, rows apart, its loss, dropout, first weights."""

import math

import pytest
import torch

from fsdp_core.config import ModelConfig, model_from_preset
from fsdp_core.model.batch import dense_part
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.weights import init_weights
from fsdp_core.parallel.rng import RandomStreams
from tests.dist.parity_programs import single_axes

SHAPES = {"vocab_size": 61, "hidden": 32, "ffn": 48, "seq": 20}
DENSE = model_from_preset("dense_tiny", SHAPES)


def build(config: ModelConfig = DENSE, seed: int = 5) -> DecoderStage:
    """An initialised decoder on plain torch."""
    axes = single_axes()
    streams = RandomStreams(3, (axes.tp,), torch.device("cpu"))
    model = DecoderStage(config, axes, LayerFactory(), streams)
    init_weights([model], seed, layers=config.layers, init_std=config.init_std)
    return model


def tokens(seed: int = 0, rows: int = 2) -> torch.Tensor:
    """Random tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, DENSE.vocab_size, (rows, DENSE.seq), generator=generator)


def loss_of(model: DecoderStage, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The model's loss."""
    local = dense_part(inputs, targets, model.axes.cp)
    result: torch.Tensor = model(local.tokens, local.part)
    return result


def logits(model: DecoderStage, inputs: torch.Tensor) -> torch.Tensor:
    """What the head gives, before the loss."""
    seen: list[torch.Tensor] = []
    assert model.head is not None
    hook = model.head.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    loss_of(model, inputs, torch.zeros_like(inputs))
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [1, 10, DENSE.seq - 1])
def test_causal_to_the_bit(position: int, dtype: torch.dtype) -> None:
    """Changing a token changes its own logits, and not one bit of any earlier one."""
    model = build().to(dtype)
    before = tokens()
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % DENSE.vocab_size
    first, second = logits(model, before), logits(model, after)
    assert torch.equal(first[:, :position], second[:, :position])
    for later in range(position, DENSE.seq):
        assert not torch.equal(first[:, later], second[:, later])


def test_rows_do_not_mix() -> None:
    """A row's logits do not depend on the other rows of the batch."""
    model = build()
    first, second = tokens(1), tokens(2)
    second[0] = first[0]
    assert torch.equal(logits(model, first)[0], logits(model, second)[0])


def test_loss_is_the_mean_cross_entropy() -> None:
    """The scalar is float32 and equals the mean negative log-likelihood of the targets."""
    model, inputs, targets = build(), tokens(3), tokens(4)
    loss = loss_of(model, inputs, targets)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    probabilities = logits(model, inputs).double().softmax(-1)
    chosen = probabilities.gather(-1, targets[..., None]).log().mean()
    assert abs(loss.item() + chosen.item()) < 1e-6
    # Small initial weights predict nothing: the loss starts near log(vocabulary).
    assert abs(loss.item() - math.log(DENSE.vocab_size)) < 0.1


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
    first = build(seed=9)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second, other = build(seed=9), build(seed=10)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (a.dim() < 2), name


def test_initial_scales() -> None:
    """Matrices have init_std, those into the residual stream less by sqrt(2 layers), norms one."""
    config = ModelConfig(hidden=256, layers=8, heads=4, kv_heads=4, ffn=256, init_std=0.5)
    for name, parameter in build(config).named_parameters():
        if parameter.dim() < 2:
            assert (parameter == 1).all(), name
            continue
        residual = name.endswith(("wo.weight", "down.weight"))
        expected = 0.5 / 4 if residual else 0.5
        # A sample deviation of n >= 65536 draws is off by 1/sqrt(2n) = 0.3 %; 2 % is seven sigma.
        assert abs(parameter.std().item() / expected - 1) < 0.02, name


def test_rope_tables_are_buffers_out_of_the_checkpoint() -> None:
    """The RoPE tables have names, and are not saved."""
    model = build()
    assert set(dict(model.named_buffers())) == {"rope.cos", "rope.sin"}
    assert not any("rope" in key for key in model.state_dict())
