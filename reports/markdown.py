"""Markdown for a comment on a pull request: failures first, and never past what a comment holds.

Whatever came from a scenario or a log is escaped: it cannot start a table cell, a tag, a link or a
mention.
"""

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.store.files import refusals
from harness.terminal import markdown_table
from reports import safety
from reports.reading import GREEN, OUTCOME_ORDER, SYMBOLS, CaseReport, Cause, Report
from reports.text import clean, one_line, short, well_formed

MAX_BYTES = 60_000
"""GitHub takes comments of 65,536 characters."""
MAX_CAUSES, MAX_AGAIN = 20, 10
MAX_ROW_CHARS, MAX_OUTPUT_CHARS = 300, 4000
MAX_STEP_FILE_BYTES, MIN_STEP_BYTES = (1 << 20) - 4096, 4096
"""GitHub Actions drops a file of more than 1 MiB whole; with little room one line is added."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+\-.!|~$])")


def render(report: Report, *, max_bytes: int = MAX_BYTES) -> str:
    """The comment, at most `max_bytes` bytes of UTF-8; what is left out is counted."""
    facts = filter(None, (report.created, report.commit[:12], report.machine, report.wall))
    nothing = not report.counts["passed"] and not report.counts["failed"]
    left_out = "; ".join(map(escape, report.notes))
    again = [case for case in report.cases if case.attempt_words]
    paragraphs = [
        f"## {escape(report.scenario)}: {escape(report.headline)}",
        " · ".join(map(escape, facts)),
        escape(report.why),
        "**No case passed: this run proves nothing about the candidates.**" if nothing else "",
        f"**{escape(report.history_note)}**" if report.history_note else "",
        f"Left out: {left_out}." if left_out else "",
        _again(again) if again else "",
    ]
    head = [line for text in paragraphs if text for line in (text, "")]
    head += _causes(report.causes, max_bytes)
    head += ["| | case | what | message |", "| --- | --- | --- | --- |"]
    foot = ["", f"Exit code {report.exit_code}. The page with maps is `report/index.html`.", ""]
    details = [_details(case) for case in report.cases if case.outcome not in GREEN]
    left = max_bytes - _size(head) - _size(foot) - 400
    # The table may take half of the room, so that the first failures are told in full.
    rows, used = _fit(map(_row, report.cases), left // 2)
    if hidden := report.cases[len(rows) :]:
        counts = Counter(case.outcome for case in hidden)
        words = ", ".join(f"{counts[o]} {o}" for o in OUTCOME_ORDER if counts[o])
        rows.append(f"\n*{len(hidden)} more cases are in the page: {words}.*")
    kept, _ = _fit(details, left - used)
    if hidden_details := len(details) - len(kept):
        kept.append(f"*{hidden_details} more failing cases in full are in the page.*")
    return "\n".join([*head, *rows, "", *kept, *foot])


def add_to_step(path: Path, report: Report) -> None:
    """Add the report to the file that the CI shows for its step, as far as there is room in it."""
    with refusals("write", path):
        left = MAX_STEP_FILE_BYTES - (path.stat().st_size if path.exists() else 0)
        text = f"{escape(report.headline)}: no room is left here, see report.md\n"
        if left >= MIN_STEP_BYTES:
            text = render(report, max_bytes=left)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + well_formed(text))


def of_safety(tables: Iterable[safety.Table]) -> str:
    """The page of safety: a table a package."""
    lines = [safety.WORDS, ""]
    for table in tables:
        rows = ([escape(words), *(escape(cell.words) for cell in cells)]
                for words, cells in table.rows)  # fmt: skip
        columns = ["combination", *map(escape, table.versions)]
        lines += [f"### {escape(table.package)}", "", *markdown_table(columns, rows), ""]
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text that reads as itself in GitHub's Markdown, on one line."""
    escaped = _SPECIAL.sub(r"\\\1", html.escape(short(one_line(text)), quote=False))
    return escaped.replace("@", "&#64;").replace("://", "&#58;//")


def fenced(text: str) -> str:
    """A code block whose fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _again(cases: list[CaseReport]) -> str:
    """Cases that the machine failed at first: a pass on the second attempt is told, not hidden."""
    shown = (f"{escape(case.spec.id)} {escape(case.attempt_words)}" for case in cases[:MAX_AGAIN])
    more = f" and {len(cases) - MAX_AGAIN} more" if len(cases) > MAX_AGAIN else ""
    return f"**Needed another attempt: {len(cases)}**: {', '.join(shown)}{more}."


def _causes(found: tuple[Cause, ...], max_bytes: int) -> list[str]:
    """What several cases share: one line a cause says more than a hundred rows."""
    if not any(len(cause.cases) > 1 for cause in found):
        return []
    rows = [
        f"| {SYMBOLS[c.outcome]} {len(c.cases)} {c.outcome} | {escape(c.what)}: {escape(c.words)} "
        f"| {escape(c.cases[0].spec.id)} |"
        for c in found[:MAX_CAUSES]
    ]
    kept, _ = _fit(rows, max_bytes // 6)
    if hidden := found[len(kept) :]:
        num = sum(len(cause.cases) for cause in hidden)
        kept.append(f"\n*{len(hidden)} more causes, of {num} cases, are in the page.*")
    return ["| cases | what they share | first of them |", "| --- | --- | --- |", *kept, ""]


def _row(case: CaseReport) -> str:
    message = escape(one_line(case.message, MAX_ROW_CHARS))
    name, what = escape(case.spec.id), escape(case.verdict.what)
    again = f" ({escape(case.attempt_words)})" if case.attempt_words else ""
    return f"| {SYMBOLS[case.outcome]} {case.outcome} | {name} | {what} | {message}{again} |"


def _details(case: CaseReport) -> str:
    name = html.escape(one_line(case.spec.id), quote=False)
    head = f"{SYMBOLS[case.outcome]} {case.outcome}: {name}"
    lines = ["<details>", f"<summary>{head}</summary>", "", escape(case.message), ""]
    if place := case.place:
        lines += [fenced("\n".join(short(one_line(line, MAX_ROW_CHARS)) for line in place)), ""]
    if case.confirmation:
        lines.append(f"- {escape(case.confirmation)}")
    for result in case.checks:
        words = escape(one_line(result.message, MAX_ROW_CHARS))
        lines.append(f"- {SYMBOLS[result.outcome]} {escape(result.check)}: {words}")
    for group in case.state.groups if case.state is not None else ():
        lines.append(f"- state, {escape(group.words)}")
    if case.curve is not None:
        lines += ["", escape(case.curve.words)]
    if case.known:
        rows = (f"{name:<12} {one_line(text, MAX_ROW_CHARS)}" for name, text in case.known)
        lines += ["", "Found by harness bisect:", "", fenced("\n".join(rows))]
    elif case.bisect:
        lines += ["", "Find the cause:", "", fenced(one_line(case.bisect))]
    lines += ["", "Repeat:", "", fenced(one_line(case.command)), ""]
    if case.output is not None:
        lines += [f"Last output of rank {case.output.rank}, {case.output.role}:", ""]
        lines += [fenced(clean(case.output.text[-MAX_OUTPUT_CHARS:])), ""]
    return "\n".join([*lines, "</details>", ""])


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8", "replace")) + 1 for line in lines)


def _fit(blocks: Iterable[str], room: int) -> tuple[list[str], int]:
    """As many leading blocks as fit, and the bytes that they take."""
    kept, used = list[str](), 0
    for block in blocks:
        if used + _size([block]) > room:
            break
        used += _size([block])
        kept.append(block)
    return kept, used
