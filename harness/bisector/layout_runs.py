"""The runs that tell where two layouts are farther apart than rounding: `layouts` compares them."""

from dataclasses import dataclass, replace

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.errors import UsageError
from harness.records import MAX_KEPT_BYTES, KeepSpec, RunSpec

NAMES = ("grads:*", "weights:*")
BRANCHES = ("layers.*.attn:output", "layers.*.mlp:output")
"""Taps of a forward pass; of its first microbatch, as contents take memory."""
NUM_SAMPLES = 6
_MAY_DIFFER = ("parallel", "fsdp", "graph", "compile", "compile_backend", "stress", "stress_seed",
               "taps", "flush_every", "graph_warmup_steps", "graph_optimizer", "ledger", "steps",
               "backend", "engine")  # fmt: skip
"""Keys of a configuration that decide how a step is computed, and not what."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What a comparison of two layouts needs.

    Attributes:
        reference, candidate: the two, which keep gradients and weights of one step.
        samples: runs that round at random.
    """

    reference: RunSpec
    candidate: RunSpec
    samples: tuple[RunSpec, ...]


def runs_to_compare(
    reference: RunSpec, candidate: RunSpec, step: int, max_bytes: int = MAX_KEPT_BYTES
) -> Runs:
    """The runs that tell where two layouts are farther apart than rounding, at one step.

    Args:
        step: of the gradients and weights that are compared.
        max_bytes: that a rank may keep.

    Raises:
        UsageError: they do not compute the same, or a layout decides more than rounding.
    """
    refuse_incomparable(reference, candidate)
    for spec in (reference, candidate):
        if step >= int(spec.config["steps"]):
            raise UsageError(f"expected a step below {spec.config['steps']}, got {step}")
    looks = all(spec.config.get("engine") == "ours" for spec in (reference, candidate))
    taps = BRANCHES if looks else ()
    names = (*NAMES, *(f"{tap}[0]" for tap in taps))
    keep = KeepSpec(step=step, names=names, max_bytes=max_bytes)
    config = TrainConfig.from_dict(reference.config)
    dp, outer = config.parallel.dp, config.parallel.dp_outer
    plain = replace(
        config, parallel=ParallelConfig(dp=dp, dp_outer=outer), graph=(), compile=(), stress=(),
        taps=taps, backend="torch", engine="ours", steps=step + 1,
    )  # fmt: skip
    # One process holds the whole model: rounding at random takes more time, and more memory.
    samples = tuple(
        RunSpec(
            config=plain.to_dict(), device="cpu", world_size=dp * outer,
            timeout_s=10 * reference.timeout_s, keep=keep, rounding=number + 1,
        )
        for number in range(NUM_SAMPLES)
    )  # fmt: skip
    first, second = (
        replace(spec, keep=keep, config=spec.config | ({"taps": list(taps)} if taps else {}))
        for spec in (reference, candidate)
    )
    return Runs(reference=first, candidate=second, samples=samples)


def refuse_incomparable(reference: RunSpec, candidate: RunSpec) -> None:
    """See that two runs compute the same but for rounding (`UsageError`: what does not)."""
    legs = [TrainConfig.from_dict(spec.config) for spec in (reference, candidate)]
    plain = [leg.to_dict() for leg in legs]
    for key in sorted(plain[0].keys() - set(_MAY_DIFFER)):
        if plain[0][key] != plain[1][key]:
            _refuse(f"the same {key}", f"{plain[0][key]!r:.60} and {plain[1][key]!r:.60}")
    if legs[0].fsdp.reduce_dtype != legs[1].fsdp.reduce_dtype:
        found = " and ".join(leg.fsdp.reduce_dtype for leg in legs)
        _refuse("the same fsdp.reduce_dtype", found)
    ranks = [leg.parallel.dp * leg.parallel.dp_outer for leg in legs]
    if ranks[0] != ranks[1]:
        # Each has sequences of its own.
        _refuse("the same data, so as many dp x dp_outer ranks", f"{ranks[0]} and {ranks[1]}")
    for leg in legs:
        if leg.parallel.dynamic_cp:
            _refuse("no parallel.dynamic_cp, whose packs depend on the layout", "it")
        if leg.model.dropout:
            _refuse("model.dropout 0, as layouts draw other masks", f"{leg.model.dropout}")
        if leg.fp8 != "none":
            _refuse("fp8 none, as scales of eight bits depend on the layout", leg.fp8)


def _refuse(expected: str, got: str) -> None:
    raise UsageError(f"between layouts: expected {expected}, got {got}")
