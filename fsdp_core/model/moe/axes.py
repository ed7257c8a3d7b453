"""The axes that a mixture of experts needs, and which of its ranks hold the same tokens.

Experts are numbered along `ep`: rank r of it has experts [r * L, (r + 1) * L), L = experts / ep.
Each expert's feed-forward width is cut along `etp`. What ranks of one etp group hold is one of

| layout | tokens of the ranks of an etp group | enter the experts | leave them |
| --- | --- | --- | --- |
| tp 1, or sequence parallel | different | all-gather | reduce-scatter |
| tp = etp, no sequence parallel | the same | identity (backward all-reduce) | all-reduce |

Any other layout without sequence parallel would send copies of one token to an expert from several
ranks and count its gradient as often, so it is refused.
"""

from dataclasses import dataclass

from fsdp_core.parallel.mesh import Axes, Axis


@dataclass(frozen=True, kw_only=True)
class MoeAxes:
    """Axes of one mixture of experts.

    Attributes:
        ep, etp: axes of the expert mesh, etp fastest.
        tp: cuts the shared experts, and with `sequence_parallel` the sequence.
        tokens: axes along which ranks hold different tokens of the dense mesh.
        num_averaged: ranks over which gradients of dense parameters are averaged.
        sequence_parallel: dim 1 of activations [B, T, H] is cut along tp.

    Raises:
        ValueError: tensor parallel without sequence parallel and etp different from tp.
    """

    ep: Axis
    etp: Axis
    tp: Axis
    tokens: tuple[Axis, ...]
    num_averaged: int
    sequence_parallel: bool

    def __post_init__(self) -> None:
        if self.tp.size > 1 and not self.sequence_parallel and self.etp.size != self.tp.size:
            raise ValueError(
                f"Expected sequence_parallel, or etp equal to tp={self.tp.size}, for experts under "
                f"tensor parallel, got sequence_parallel=False and etp={self.etp.size}: every tp "
                "rank would send its copy of a token to the experts."
            )

    @classmethod
    def of(cls, axes: Axes) -> "MoeAxes":
        """Those of a layout."""
        across = (axes.dp_outer, axes.dp, axes.cp)
        return cls(
            ep=axes.ep,
            etp=axes.etp,
            tp=axes.tp,
            tokens=(*across, axes.tp) if axes.sequence_parallel else across,
            num_averaged=axes.dp_outer.size * axes.dp.size * axes.cp.size,
            sequence_parallel=axes.sequence_parallel,
        )

    @property
    def etp_shares_tokens(self) -> bool:
        """Whether the ranks of an etp group hold the same tokens."""
        return self.tp.size > 1 and not self.sequence_parallel

    def local_experts(self, num_experts: int) -> int:
        """Experts of one rank, L.

        Raises:
            ValueError: ep does not divide the number of experts.
        """
        if num_experts % self.ep.size:
            raise ValueError(
                f"Expected a number of experts divisible by ep={self.ep.size}, got {num_experts}."
            )
        return num_experts // self.ep.size
