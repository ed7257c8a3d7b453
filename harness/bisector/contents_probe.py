"""The first element that differs: both legs again, the first wrong tensor's bytes kept."""

from collections.abc import Sequence
from dataclasses import replace

from harness.bisector.asking import Asker, judged_by
from harness.bisector.elements import Compared, compare
from harness.bisector.found import Location
from harness.contents import read_contents
from harness.keeping import KeepSpec
from harness.records import DIGEST_GROUPS, CaseSpec, RunSpec

WORDS = "which element of {} differs first in step {}?"


def kept_name(found: Location) -> str:
    """What to keep, as `KeepSpec.names` has it; "" where nothing can be kept.

    Moments of a tensor are told by its name alone: both are kept.
    """
    if found.quantity.startswith("taps."):
        return f"{found.tensor}[{found.microbatch}]" if found.microbatch is not None else ""
    if found.quantity not in DIGEST_GROUPS:
        return ""
    star = "*" if found.quantity == "optim" and found.tensor != "step_count" else ""
    return f"{found.quantity}:{found.tensor}{star}"


def look_at_elements(
    found: Location, case: CaseSpec, specs: Sequence[RunSpec], asker: Asker
) -> Location:
    """The place with its first differing element, or with the reason why there is none.

    Args:
        found: names a tensor.
        case: in question.
        specs: both legs, as they were when the tensor was found to differ.
        asker: makes the runs.

    Raises:
        OutOfBudget: they cost more than is left.
    """
    name = kept_name(found)
    if not name or found.step is None:
        return found
    keep = KeepSpec(step=found.step, names=(name,))
    reference, candidate = (replace(spec, keep=keep) for spec in specs)
    question = replace(
        case, id=f"keep-{candidate.key}", labels={"question": "contents"}, reference=reference,
        control=reference, candidate=candidate, repeats=0, skip_reason="",
    )  # fmt: skip
    asker.ask(
        question,
        WORDS.format(name, found.step),
        judge=judged_by(lambda *_: "its contents are kept"),
    )
    ours, theirs = (
        read_contents(asker.folder.run_folder(spec.key), spec) for spec in (reference, candidate)
    )
    named = dict.fromkeys((*ours.names, *theirs.names)) or {name: None}
    answers = [compare(ours, theirs, each) for each in named]
    compared = next((each for each in answers if each.element is not None), answers[0])
    return _with(found, compared)


def _with(found: Location, compared: Compared) -> Location:
    unknown = (*found.unknown, *compared.notes)
    if compared.element is None:
        return replace(found, unknown=(*unknown, f"element: {compared.message}"))
    return replace(
        found, element=compared.element, unknown=unknown,
        evidence=(*found.evidence, compared.message),
    )  # fmt: skip
