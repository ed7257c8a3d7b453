"""The decoder: causal to the bit, initialised by name order, mean cross entropy."""

import math

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.config import ModelConfig
from fsdp_core.model.attention import AttentionBranch
from fsdp_core.model.backend import TorchBackend
from fsdp_core.model.transformer import Decoder, MlpBranch

CPU = torch.device("cpu")
CONFIG = ModelConfig(vocab_size=61, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, seq=20)


def build(config: ModelConfig = CONFIG, seed: int = 5) -> Decoder:
    """An initialised decoder on plain torch."""
    model = Decoder(config, TorchBackend())
    model.init_weights(seed)
    model.set_rope(CPU)
    return model


def tokens(seed: int = 0, rows: int = 2) -> torch.Tensor:
    """Random tokens of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CONFIG.vocab_size, (rows, CONFIG.seq), generator=generator)


def logits(model: Decoder, tokens_bt: torch.Tensor) -> torch.Tensor:
    """What the head gives, before the loss."""
    seen = []
    hook = model.head.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    model(tokens_bt, torch.zeros_like(tokens_bt))
    hook.remove()
    result: torch.Tensor = seen[0]
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [1, 10, CONFIG.seq - 1])
def test_causal_to_the_bit(position: int, dtype: torch.dtype) -> None:
    """Changing a token changes its own logits, and not one bit of any earlier one."""
    model = build().to(dtype)
    before = tokens()
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % CONFIG.vocab_size
    first, second = logits(model, before), logits(model, after)
    assert torch.equal(first[:, :position], second[:, :position])
    for later in range(position, CONFIG.seq):
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
    loss = model(inputs, targets)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    probabilities = logits(model, inputs).double().softmax(-1)
    chosen = probabilities.gather(-1, targets[..., None]).log().mean()
    assert abs(loss.item() + chosen.item()) < 1e-6
    # Small initial weights predict nothing: the loss starts near log(vocabulary).
    assert abs(loss.item() - math.log(CONFIG.vocab_size)) < 0.1


def test_attention_branch_is_its_formula() -> None:
    """Grouped-query attention equals softmax(QK/sqrt(d))V with each KV head used by its group."""
    branch = AttentionBranch(CONFIG, TorchBackend())
    torch.manual_seed(0)
    x = torch.randn(1, 6, 32)
    cos, sin = torch.ones(6, 4), torch.zeros(6, 4)
    normed = branch.norm(x)[0]
    q = branch.wq(normed).view(6, 4, 8)
    k, v = branch.wk(normed).view(6, 2, 8), branch.wv(normed).view(6, 2, 8)
    heads = []
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].t() / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[:, head // 2])
    expected = x + branch.wo(torch.cat(heads, dim=-1))
    torch.testing.assert_close(branch(x, cos, sin), expected, rtol=1e-5, atol=1e-6)


def test_mlp_branch_is_its_formula() -> None:
    """SwiGLU with a residual: x + down(silu(gate(norm(x))) * up(norm(x)))."""
    branch = MlpBranch(CONFIG, TorchBackend())
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    n = branch.norm(x)
    assert torch.equal(branch(x), x + branch.down(F.silu(branch.gate(n)) * branch.up(n)))


def test_dropout_only_in_training() -> None:
    """Dropout draws anew at each training forward, and is off in evaluation."""
    model = build(ModelConfig(vocab_size=61, hidden=32, ffn=48, seq=20, dropout=0.5))
    inputs = tokens()
    assert not torch.equal(logits(model, inputs), logits(model, inputs))
    model.eval()
    assert torch.equal(logits(model, inputs), logits(model, inputs))


def test_init_bits_depend_on_the_seed_alone() -> None:
    """Same seed, same bits, whatever the default generator did; another seed, other bits."""
    torch.manual_seed(1)
    first = build(seed=9)
    torch.manual_seed(2)
    second, other = build(seed=9), build(seed=10)
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (a.dim() < 2), name


def test_init_leaves_the_default_generator_alone() -> None:
    """Initialising draws nothing from the generator that dropout uses."""
    model = Decoder(CONFIG, TorchBackend())
    before = torch.get_rng_state()
    model.init_weights(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_init_scales() -> None:
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
    assert set(dict(model.named_buffers())) == {"rope_cos", "rope_sin"}
    assert not any("rope" in key for key in model.state_dict())
