"""Numbers that are wrong: of weights, gradients, moments, or of how they are made."""

from harness.faults.fault import AT_TENSOR, Fault, Pointer

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="ulp",
        description="One element of a main weight moves by one ulp after the optimizer step.",
        takes=AT_TENSOR,
        expects=("diverged",),
        kind="numerics",
        symptom="weights and losses drift apart in their last bits from then on",
        points_at=Pointer(phase="optimizer", module="embedding", tensor="embedding.weight"),
    ),
    Fault(
        name="nan",
        description="NaN is written into one element of a main weight.",
        takes=AT_TENSOR,
        expects=("nonfinite", "diverged"),
        kind="numerics",
        symptom="the loss is NaN from the next step on",
        points_at=Pointer(phase="optimizer", module="embedding", tensor="embedding.weight"),
    ),
    Fault(
        name="negative_zero",
        description="-0.0 is written into one element of a main weight, 0.0 in the other legs.",
        takes=AT_TENSOR,
        expects=("diverged",),
        counterpart="positive_zero",
        kind="numerics",
        symptom="nothing; a quotient or a square root may get another sign later",
        points_at=Pointer(phase="optimizer", module="embedding", tensor="embedding.weight"),
    ),
    Fault(
        name="positive_zero",
        description="0.0 is written into one element of a main weight (see negative_zero).",
        takes=AT_TENSOR,
        expects=("diverged",),
        kind="numerics",
        symptom="one weight is lost",
        points_at=Pointer(phase="optimizer", module="embedding", tensor="embedding.weight"),
    ),
)
