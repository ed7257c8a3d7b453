"""Patterns of taps: which modules they mean, and what is no pattern."""

import pytest

from fsdp_core.config import ConfigError, TrainConfig, tap_pattern

NAMES = (
    "embedding", "layers.0", "layers.0.attn", "layers.0.attn.norm", "layers.10.attn",
    "layers.10.mlp.moe.router", "norm", "head",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind", "meant"),
    [
        ("norm", "output", ["norm"]),
        ("norm:gradient", "gradient", ["norm"]),
        ("layers.0.attn.norm", "output", ["layers.0.attn.norm"]),
        ("layers.*:input", "input", ["layers.0"]),
        ("layers.*.attn:output", "output", ["layers.0.attn", "layers.10.attn"]),
        ("layers.1*.attn", "output", ["layers.10.attn"]),
        ("layers.10.**", "output", ["layers.10.attn", "layers.10.mlp.moe.router"]),
        ("**.norm", "output", ["layers.0.attn.norm"]),
        ("**", "output", list(NAMES)),
        ("*", "output", ["embedding", "norm", "head"]),
        ("norm.norm", "output", []),
    ],
)
def test_a_pattern_means_names(text: str, kind: str, meant: list[str]) -> None:
    """One star is one part of a name, two are any number; a dot is a dot; output is understood."""
    pattern = tap_pattern(text)
    assert pattern.kind == kind
    assert [name for name in NAMES if pattern.matches(name)] == meant
    assert not pattern.matches("layers_0_attn_norm") or text.startswith("*")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("norm:grad", "input, output or gradient after the colon"),
        ("norm:", "input, output or gradient after the colon"),
        ("norm:output:input", "input, output or gradient after the colon"),
        (":output", "a module's dotted name"),
        ("", "a module's dotted name"),
        ("layers..attn", "a module's dotted name"),
        ("layers.[01]", "a module's dotted name"),
    ],
)
def test_what_is_no_pattern_is_refused(text: str, why: str) -> None:
    """A run that would look into nothing, or elsewhere, is refused by the key and the reason."""
    with pytest.raises(ConfigError, match=f"^taps: expected {why}"):
        TrainConfig(taps=(text,))


def test_a_tap_is_asked_for_once() -> None:
    """Two names of one tap are one tap."""
    with pytest.raises(ConfigError, match="each pattern once"):
        TrainConfig(taps=("norm", "head", "norm:output"))
    assert TrainConfig(taps=("norm", "norm:gradient")).taps == ("norm", "norm:gradient")
