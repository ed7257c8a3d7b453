"""Rotary embedding: a rotation, whose inner products know only the distance."""

import math

import torch

from fsdp_core.model.attention import apply_rope, rope_tables

SEQ, HEADS, DIM = 48, 3, 16
CPU = torch.device("cpu")


def draw(seed: int) -> torch.Tensor:
    """One vector a head, the same at every position: float32 [1, SEQ, HEADS, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 1, HEADS, DIM, generator=generator).expand(1, SEQ, HEADS, DIM)


def test_tables() -> None:
    """Angles are position * theta^(-2i/d), to float32 rounding of the cosine and sine."""
    cos, sin = rope_tables(SEQ, DIM, 1000.0, CPU)
    assert cos.shape == sin.shape == (SEQ, DIM // 2)
    assert cos.dtype == sin.dtype == torch.float32
    for t in (0, 1, SEQ - 1):
        for i in (0, 3, DIM // 2 - 1):
            angle = t * 1000.0 ** (-2 * i / DIM)
            assert abs(cos[t, i].item() - math.cos(angle)) <= 2**-24
            assert abs(sin[t, i].item() - math.sin(angle)) <= 2**-24


def test_position_zero_is_untouched() -> None:
    """At position 0 the rotation is the identity, bit for bit."""
    x = draw(0)
    out = apply_rope(x, *rope_tables(SEQ, DIM, 10_000.0, CPU))
    assert torch.equal(out[:, 0], x[:, 0])
    assert not torch.equal(out[:, 1], x[:, 1])


def test_keeps_norms() -> None:
    """Each pair (i, i + d/2) keeps its length."""
    x = draw(1)
    out = apply_rope(x, *rope_tables(SEQ, DIM, 10_000.0, CPU))
    before = x[..., : DIM // 2].double().square() + x[..., DIM // 2 :].double().square()
    after = out[..., : DIM // 2].double().square() + out[..., DIM // 2 :].double().square()
    # Per component: two table roundings, two products, a sum, each 2^-24, of at most |a| + |b|
    # <= sqrt(2) r; squared: 2 * sqrt(2) r * 5 * 2^-24 * sqrt(2) r a component, two of them.
    assert ((after - before).abs() <= 2 * 4 * 5 * 2**-24 * before).all()


def test_inner_products_depend_on_the_distance_only() -> None:
    """<rope(q, s), rope(k, t)> is the same for all pairs with equal s - t, within rounding."""
    tables = rope_tables(SEQ, DIM, 10_000.0, CPU)
    q, k = apply_rope(draw(2), *tables).double(), apply_rope(draw(3), *tables).double()
    scores = torch.einsum("bsnd,btnd->bnst", q, k)[0]
    size = draw(2)[0, 0].double().norm(dim=-1) * draw(3)[0, 0].double().norm(dim=-1)
    # Relative error of a rotated component pair is <= 5 * sqrt(2) * 2^-24 (see above), for q and k
    # both; an inner product of two such vectors errs by at most the sum times |q||k|.
    bound = 2 * 2 * 5 * math.sqrt(2) * 2**-24
    for distance in (0, 1, 7, SEQ // 2):
        diagonal = scores.diagonal(offset=-distance, dim1=1, dim2=2)
        spread = diagonal.max(dim=1).values - diagonal.min(dim=1).values
        assert (spread <= bound * size).all()
    assert (scores[:, 0, 0] - scores[:, 5, 0]).abs().min() > 1e3 * bound


def test_computes_in_float32() -> None:
    """A bf16 input is rotated in float32 and rounded once."""
    x = draw(4).bfloat16()
    tables = rope_tables(SEQ, DIM, 10_000.0, CPU)
    out = apply_rope(x, *tables)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rope(x.float(), *tables).bfloat16())
