"""The first element that differs: both legs again, the first wrong tensor's bytes kept."""

from collections.abc import Sequence
from dataclasses import replace

from harness.bisector.elements import compare
from harness.bisector.found import Location
from harness.records import DIGEST_GROUPS, CaseSpec, KeepSpec, RunSpec
from harness.store import RunFolder
from harness.store.contents import read_contents


def kept_name(found: Location) -> str:
    """What to keep, as `KeepSpec.names` has it; "" where nothing can be kept.

    Moments of a tensor are told by its name alone: both are kept.
    """
    if found.quantity.startswith("taps."):
        if found.microbatch is None or found.tensor.endswith("]"):
            return found.tensor if found.microbatch is not None else ""
        return f"{found.tensor}[{found.microbatch}]"
    if found.quantity not in DIGEST_GROUPS:
        return ""
    star = "*" if found.quantity == "optim" and found.tensor != "step_count" else ""
    return f"{found.quantity}:{found.tensor}{star}"


def contents_case(found: Location, case: CaseSpec, specs: Sequence[RunSpec]) -> CaseSpec:
    """The question for the contents of the tensor that a place names.

    Args:
        found: names a tensor and a step.
        case: in question.
        specs: both legs, as they were when the tensor was found to differ.
    """
    assert found.step is not None
    keep = KeepSpec(step=found.step, names=(kept_name(found),))
    reference, candidate = (replace(spec, keep=keep) for spec in specs)
    return replace(
        case, id=f"keep-{candidate.key}", labels={"question": "contents"}, reference=reference,
        control=reference, candidate=candidate, repeats=0, skip_reason="",
    )  # fmt: skip


def with_element(found: Location, question: CaseSpec, folder: RunFolder) -> Location:
    """The place with its first differing element, or with the reason why there is none."""
    ours, theirs = (
        read_contents(folder.run_folder(spec.key), spec)
        for spec in (question.reference, question.candidate)
    )
    named = dict.fromkeys((*ours.names, *theirs.names)) or {kept_name(found): None}
    answers = [compare(ours, theirs, name) for name in named]
    compared = next((each for each in answers if each.element is not None), answers[0])
    unknown = (*found.unknown, *compared.notes)
    if compared.element is None:
        return replace(found, unknown=(*unknown, f"element: {compared.message}"))
    return replace(
        found, element=compared.element, unknown=unknown,
        evidence=(*found.evidence, compared.message),
    )  # fmt: skip
