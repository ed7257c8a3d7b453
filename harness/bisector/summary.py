"""The answer in words: the same lines for the screen and for the page.

Whoever is woken up at night reads the first three lines: what failed, where it entered, and the
first thing that is wrong there.
"""

from harness.bisector.causes import FoundCauses
from harness.bisector.findings import Findings
from harness.bisector.found import Element, Location
from harness.checks.steps import count, show_ranks

UNKNOWN = "not known"


def where(place: Location | None) -> str:
    """`step 7, backward, microbatch 1, layers.0.attn.wq, rank 3`."""
    if place is None:
        return UNKNOWN
    parts = [
        "" if place.step is None else f"step {place.step}",
        place.phase or "",
        "" if place.microbatch is None else f"microbatch {place.microbatch}",
        place.module,
        show_ranks(set(place.ranks)) if place.ranks else "",
    ]
    return ", ".join(part for part in parts if part) or UNKNOWN


def first_wrong(place: Location | None) -> str:
    """The first wrong tensor."""
    if place is None or not (place.tensor or place.quantity):
        return UNKNOWN
    name = place.tensor or place.quantity
    of = f" ({place.quantity})" if place.quantity and place.quantity != name else ""
    return f"{name}{of}"


def element(found: Element) -> str:
    """`[3, 17]: 0x3f8a21c4 became 0x3f8a21c5, 1 ulp apart (1.07 became 1.0700001); ...`."""
    index = ", ".join(map(str, found.index))
    apart = "" if found.ulps is None else f", {count(found.ulps, 'ulp')} apart"
    return (
        f"[{index}]: 0x{found.reference_bits} became 0x{found.candidate_bits}{apart} "
        f"({found.reference} became {found.candidate}); "
        f"{found.num_different} of {count(found.numel, 'element')} differ"
    )


def side(place: Location | None) -> str:
    """On which side of which collective the origin lies; "" if that is not known."""
    if place is None or not place.collective:
        return ""
    return f"{place.near} {place.collective}".strip()


def since(place: Location | None) -> str:
    """From which step on."""
    if place is None or place.step is None:
        return UNKNOWN
    if place.step == 0:
        return "the first step"
    if not any(told.startswith(("step 0 is equal", "steps 0 to ")) for told in place.evidence):
        return f"step {place.step}"
    before = "step 0 is" if place.step == 1 else f"steps 0 to {place.step - 1} are"
    return f"step {place.step}; {before} equal on every rank"


def causes(found: FoundCauses | None) -> list[str]:
    """A line for each smallest set of differences that fails."""
    if found is None:
        return []
    num = len(found.candidates)
    of = f"of {count(num, 'difference')} between the legs"
    if not found.causes:
        # A search that was not made has its reason as a note: nothing was looked for in vain.
        why = found.notes if not found.num_questions else ()
        return list(why) or [f"none found {of}"]
    lines = [str(cause) for cause in found.causes]
    lines[0] += f"; {of}"
    return lines


def facts(findings: Findings) -> list[tuple[str, str]]:
    """Name and text of each line, in the order in which they are read."""
    place = findings.place
    if findings.outcome == "passed":
        return []  # there is no place to speak of
    lines = [
        ("where", where(place)),
        ("first wrong", first_wrong(place)),
    ]
    if place is not None and place.element is not None:
        lines.append(("element", element(place.element)))
    if beside := side(place):
        lines.append(("ranks", beside))
    lines.append(("since", since(place)))
    lines += [("why", why) for why in causes(findings.causes)]
    if findings.least_case is not None:
        lines.append(("least case", str(findings.least_case)))
    if findings.commits is not None:
        lines.append(("commit", str(findings.commits)))
    return lines


def spent(findings: Findings) -> str:
    """`2 questions, 4 runs, 38 s`."""
    return (
        f"{count(len(findings.questions), 'question')}, {count(findings.num_runs, 'run')}, "
        f"{findings.seconds:.0f} s"
    )
