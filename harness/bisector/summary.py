"""The answer in words: the same lines for the screen and for the page.

Whoever is woken up at night reads the first three lines: what failed, where it entered, and the
first thing that is wrong there.
"""

import math

from harness.bisector.causes import FoundCauses
from harness.bisector.findings import AskedQuestion, Findings
from harness.bisector.found import Element, Location
from harness.bisector.words import UNKNOWN, where
from harness.checks.evidence import count
from harness.errors import one_line
from harness.records import WHATS

OTHER_ENVIRONMENT = (
    "the legs ran in other environments, so no setting is searched for: make them alike, run again"
)


def first_wrong(place: Location | None) -> str:
    """The first wrong tensor."""
    if place is None or not (place.tensor or place.quantity):
        return UNKNOWN
    name = place.tensor or place.quantity
    is_said = place.quantity in ("", name) or place.quantity.startswith("taps.")
    of = "" if is_said else f" ({place.quantity})"
    return f"{name}{of}"


def element(found: Element) -> str:
    """`[3, 17]: 0x3f8a21c4 became 0x3f8a21c5, 1 ulp apart (1.07 became 1.0700001); ...`."""
    index = ", ".join(map(str, found.index))
    is_float = "float" in found.dtype
    apart = "" if found.ulps is None or not is_float else f", {count(found.ulps, 'ulp')} apart"
    return (
        f"[{index}]: 0x{found.reference_bits} became 0x{found.candidate_bits}{apart} "
        f"({found.reference} became {found.candidate}); "
        f"{found.num_different} of {count(found.numel, 'element')} differ{_where_in(found)}"
    )


def _where_in(found: Element) -> str:
    """`: [:, :, 63]`, `, within [0:2, :, 63]` if some in it are equal; "" if all over."""
    bounds = list(zip(found.lows, found.highs, found.shape, strict=True))
    sizes = [high - low + 1 for low, high, _ in bounds]
    if found.num_different == 1 or sizes == list(found.shape):
        return ""
    axes = [
        ":" if size == whole and whole > 1 else str(low) if size == 1 else f"{low}:{high + 1}"
        for (low, high, whole), size in zip(bounds, sizes, strict=True)
    ]
    told = "" if math.prod(sizes) == found.num_different else ", within"
    return f"{told or ':'} [{', '.join(axes)}] of {list(found.shape)}"


def side(place: Location | None) -> str:
    """On which side of which collective the origin lies; "" if that is not known."""
    if place is None or not place.collective:
        return ""
    return f"{place.near} {place.collective}".strip()


def since(place: Location | None) -> str:
    """From which step on."""
    if place is None or place.step is None:
        return UNKNOWN
    if place.step < 0:
        return "before step 0"
    if place.step == 0:
        return "the first step"
    if not place.before_is_equal:
        return f"step {place.step}"
    before = "step 0 is" if place.step == 1 else f"steps 0 to {place.step - 1} are"
    return f"step {place.step}; {before} equal on every rank"


def causes(found: FoundCauses | None) -> list[str]:
    """A line for each smallest set of differences that fails."""
    if found is None:
        return []
    num = len(found.candidates)
    of = f"of {count(num, 'difference')} between the two runs"
    if not found.causes:
        # A search that was not made has its reason as a note: nothing was looked for in vain.
        why = found.notes if not found.num_questions else ()
        return list(why) or [f"none found {of}"]
    lines = [str(cause) for cause in found.causes]
    blamed = {change for cause in found.causes for change in cause.changes}
    lines[0] += f"; {len(blamed)} {of}"
    return lines


def facts(findings: Findings) -> list[tuple[str, str]]:
    """Name and text of each line, in the order in which they are read."""
    place = findings.place
    if findings.outcome == "passed":
        return []  # there is no place to speak of
    is_end = place is not None and not place.tensor and place.quantity in WHATS
    lines = [
        ("where", where(place)),
        ("ended as" if is_end else "first wrong", first_wrong(place)),
    ]
    if place is not None and place.element is not None:
        lines.append(("element", element(place.element)))
    if beside := side(place):
        lines.append(("entered", beside))
    lines.append(("since", since(place)))
    how_often = findings.causes.patience if findings.causes is not None else None
    if how_often is not None and not how_often.always:
        seldom = f"failed in {how_often.failures} of {count(how_often.trials, 'run')}"
        lines.append(("how often", seldom))
    lines += [("why", why) for why in causes(findings.causes)]
    if findings.layers is not None:
        lines.append(("layers", str(findings.layers)))
    if findings.what == "different_environment":
        lines.append(("why", OTHER_ENVIRONMENT))
    if findings.least_case is not None:
        lines.append(("least case", str(findings.least_case)))
    if findings.commits is not None:
        lines.append(("commit", str(findings.commits)))
    if findings.release is not None:
        lines.append(("release", str(findings.release)))
    return lines


def spent(findings: Findings) -> str:
    """`2 questions, 4 runs, 38 s`."""
    return (
        f"{count(len(findings.questions), 'question')}, {count(findings.num_runs, 'run')}, "
        f"{findings.seconds:.0f} s"
    )


def asked(words: str) -> str:
    """A question, ready for its answer."""
    told = one_line(words)
    return told if told.endswith("?") else f"{told}:"


def cost(question: AskedQuestion) -> str:
    """` (2 runs, 4.1 s)`; "" for what was known."""
    runs = question.runs
    return f" ({count(runs, 'run')}, {question.seconds:.1f} s)" if runs else ""
