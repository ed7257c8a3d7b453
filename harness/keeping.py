"""Which tensors a run is asked to keep whole, elements and all, and at which step."""

from dataclasses import dataclass

from harness.codec import Json, RecordError

DEFAULT_MAX_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class KeepSpec(Json):
    """Contents of tensors that every rank writes down, as they were digested in one step.

    Attributes:
        step: of which.
        names: `grads:layers.0.attn.attention.wq.weight`, a digest group and a name in its records;
            `layers.1.attn:output[1]`, a row of taps that the run has; a star is any text.
        max_bytes: of all of them on one rank; more is an error of the rank.
    """

    step: int
    names: tuple[str, ...]
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        if self.step < 0:
            raise RecordError(f"keep.step: expected a number >= 0, got {self.step}")
        if not self.names:
            raise RecordError("keep.names: expected names of tensors, got none")
        if self.max_bytes <= 0:
            raise RecordError(f"keep.max_bytes: expected a number > 0, got {self.max_bytes}")
