"""JUnit XML as continuous integration reads it, in the narrow form that every reader accepts.

    testsuites > testsuite > properties, testcase
    testcase   > failure | error | skipped, attempts, system-out, system-err
    attempts   flakyError of a case that passed, rerunError of one that did not (Surefire)

A case without a verdict is an `error`, so is a run without cases: neither may look green. Every
attempt of a run but the one that was judged is an element of each case that it served.
"""

from xml.etree import ElementTree as ET

from reports.reading import CaseReport, Report
from reports.text import clean, one_line

MAX_MESSAGE_CHARS = 1000
KINDS = {"failed": "failure", "error": "error", "incomparable": "error", "skipped": "skipped"}


def render(report: Report) -> str:
    """The XML text, with declaration."""
    counts, seconds = report.counts, _seconds(report.wall_s)
    empty = int(not report.cases)
    totals = {
        "tests": str(len(report.cases) + empty), "failures": str(counts["failed"]),
        "errors": str(counts["error"] + counts["incomparable"] + empty),
    }  # fmt: skip
    name = report.scenario or "scenario"
    root = ET.Element("testsuites", {"name": name, "time": seconds, **totals})
    facts = {"name": name, "skipped": str(counts["skipped"]), "time": seconds}
    facts |= {"timestamp": report.created} if report.created else {}
    suite = ET.SubElement(root, "testsuite", facts | totals)
    properties = ET.SubElement(suite, "properties")
    known = {"why": report.why, "exit_code": report.exit_code, "commit": report.commit,
             "machine": report.machine}  # fmt: skip
    for letter, values in report.environments.items():
        known |= {f"environment.{letter}.{one_line(k, 100)}": values[k] for k in sorted(values)}
    for key, value in known.items():
        ET.SubElement(properties, "property", {"name": key, "value": one_line(str(value))})
    for case in report.cases:
        _case(suite, name, case)
    if empty:
        element = ET.SubElement(suite, "testcase", {"name": "nothing ran", "classname": name})
        ET.SubElement(element, "error", {"message": "no case was planned", "type": "not_run"})
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _seconds(value: float) -> str:
    # A damaged file may hold any float; the schema knows only plain decimals.
    return f"{value:.3f}" if 0 <= value < float("inf") else "0.000"


def _case(suite: ET.Element, classname: str, case: CaseReport) -> None:
    facts = {"name": case.spec.id, "classname": classname, "time": _seconds(case.verdict.wall_s)}
    element = ET.SubElement(suite, "testcase", facts)
    if kind := KINDS.get(case.outcome):
        said = {"message": one_line(case.message, MAX_MESSAGE_CHARS)}
        if kind != "skipped":
            said["type"] = case.verdict.what or case.outcome
        answer = ET.SubElement(element, kind, said)
        answer.text = None if kind == "skipped" else _answers(case)
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
            trace = ET.SubElement(ET.SubElement(element, name, facts), "stackTrace")
            trace.text = one_line(f"{attempt.key}: {attempt.what}: {attempt.message}")


def _answers(case: CaseReport) -> str:
    checks = [f"{result.check}: {result.outcome}: {result.message}" for result in case.checks]
    lines = [case.message, *filter(None, [case.confirmation]), *case.place, *checks]
    return "\n".join(map(one_line, lines))
