"""When would a weaker check have seen it? First differing steps by three kinds of evidence.

    state            any digest, on any rank
    loss bits        the bits of any rank's loss
    loss, 5 decimals any rank's loss as text with five decimals, as golden files hold it

A difference that only the first sees is the reason for digests; the answer is stated beside every
failed state check, so that a reader sees what cheaper evidence would have missed.
"""

from collections.abc import Callable

from harness.checks.steps import StepTable
from harness.records import StepRecord

NEVER = -1


def first_steps(ours: StepTable, theirs: StepTable) -> dict[str, int]:
    """First step that differs by each kind of evidence, `NEVER` if none does in shared steps."""
    views: dict[str, Callable[[StepRecord], object]] = {
        "first_step_state": lambda record: record.digests,
        "first_step_loss_bits": lambda record: None if record.loss is None else record.loss.bits,
        "first_step_loss_5_decimals": five_decimals,
    }
    shared = sorted(set(ours) & set(theirs))
    return {
        name: min((key[0] for key in shared if view(ours[key]) != view(theirs[key])), default=NEVER)
        for name, view in views.items()
    }


def five_decimals(record: StepRecord) -> str:
    """The loss rounded to five decimals, as text; not finite is one word for all its kinds."""
    if record.loss is None:
        return "none"
    return "nan" if record.loss.value is None else f"{record.loss.value:.5f}"


def sentence(steps: dict[str, int]) -> str:
    """What the loss alone would have shown, for people."""
    bits, decimals = steps["first_step_loss_bits"], steps["first_step_loss_5_decimals"]
    return f"the bits of the loss {_when(bits)}, its 5 decimals {_when(decimals)}"


def _when(step: int) -> str:
    return "never differ" if step == NEVER else f"differ first at step {step}"
