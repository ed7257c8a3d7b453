"""JUnit XML as continuous integration reads it, in the narrow form that every reader accepts.

    testsuites > testsuite > properties, testcase
    testcase   > failure | error | skipped, attempts, system-out, system-err
    attempts   flakyError of a case that passed, rerunError of one that did not (Surefire)

A case without a verdict is an `error`, so is a run without cases: neither may look green. Every
attempt of a run but the one that was judged is an element of each case that it served.
"""

from xml.etree import ElementTree as ET

from reports.report import CaseReport, Report
from reports.text import clean, one_line

MAX_MESSAGE_CHARS = 1000


def render(report: Report) -> str:
    """The XML text, with declaration."""
    failures = report.counts["failed"]
    errors = report.counts["error"] + report.counts["incomparable"]
    num_tests = len(report.cases)
    if not report.cases:
        errors, num_tests = 1, 1
    seconds = _seconds(report.wall_s)
    totals = {"tests": str(num_tests), "failures": str(failures), "errors": str(errors)}
    name = report.scenario or "scenario"
    root = ET.Element("testsuites", {"name": name, "time": seconds, **totals})
    suite_facts = {"name": name, "skipped": str(report.counts["skipped"]), "time": seconds}
    if report.created:
        suite_facts["timestamp"] = report.created
    suite = ET.SubElement(root, "testsuite", suite_facts | totals)
    properties = ET.SubElement(suite, "properties")
    for key, value in _properties(report):
        ET.SubElement(properties, "property", {"name": key, "value": value})
    for case in report.cases:
        _case(suite, name, case)
    if not report.cases:
        empty = ET.SubElement(suite, "testcase", {"name": "nothing ran", "classname": name})
        ET.SubElement(empty, "error", {"message": "no case was planned", "type": "not_run"})
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _seconds(value: float) -> str:
    # A damaged file may hold any float; the schema knows only plain decimals.
    return f"{value:.3f}" if 0 <= value < float("inf") else "0.000"


def _properties(report: Report) -> list[tuple[str, str]]:
    found = [("why", report.why), ("exit_code", str(report.exit_code)),
             ("commit", report.commit), ("machine", report.machine)]  # fmt: skip
    for letter, values in report.environments.items():
        for key in sorted(values):
            found.append((f"environment.{letter}.{one_line(key, 100)}", one_line(str(values[key]))))
    return found


def _case(suite: ET.Element, classname: str, case: CaseReport) -> None:
    facts = {"name": case.spec.id, "classname": classname, "time": _seconds(case.verdict.wall_s)}
    element = ET.SubElement(suite, "testcase", facts)
    message = one_line(case.message, MAX_MESSAGE_CHARS)
    kind = case.verdict.what or case.outcome
    match case.outcome:
        case "passed":
            pass
        case "skipped":
            ET.SubElement(element, "skipped", {"message": message})
        case "failed":
            failure = ET.SubElement(element, "failure", {"message": message, "type": kind})
            failure.text = _answers(case)
        case "error" | "incomparable":
            error = ET.SubElement(element, "error", {"message": message, "type": kind})
            error.text = _answers(case)
    _attempts(element, case)
    out = ET.SubElement(element, "system-out")
    labels = ", ".join(f"{key}={value}" for key, value in sorted(case.spec.labels.items()))
    bisect = f"\nfind the cause: {case.bisect}" if case.bisect else ""
    out.text = clean(f"{labels}{bisect}\nrepeat: {case.command}")
    if case.output is not None:
        err = ET.SubElement(element, "system-err")
        err.text = f"rank {case.output.rank} of the {case.output.role}\n{case.output.text}"


def _attempts(element: ET.Element, case: CaseReport) -> None:
    name = "flakyError" if case.outcome == "passed" else "rerunError"
    for role, own in case.attempts.items():
        for attempt in own:
            kind = attempt.signature or attempt.what or "interrupted"
            told = one_line(attempt.message, MAX_MESSAGE_CHARS)
            facts = {"message": f"attempt {attempt.number + 1} of the {role}: {told}", "type": kind}
            entry = ET.SubElement(element, name, facts)
            trace = ET.SubElement(entry, "stackTrace")
            trace.text = one_line(f"{attempt.key}: {attempt.what}: {attempt.message}")


def _answers(case: CaseReport) -> str:
    lines = [case.message, *filter(None, [case.confirmation])]
    place = case.verdict.difference
    if place is not None:
        where = f"step {place.step}, rank {place.rank}, {place.quantity} {place.tensor}"
        lines += [one_line(where), one_line(f"reference {place.reference}")]
        lines += [one_line(f"candidate {place.candidate}")]
    lines += [
        one_line(f"{result.check}: {result.outcome}: {result.message}") for result in case.checks
    ]
    return "\n".join(lines)
