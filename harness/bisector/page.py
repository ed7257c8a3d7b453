"""`bisect.md`: one page that stands for the search, for people who were not there."""

from pathlib import Path

from harness.bisector.findings import Findings
from harness.bisector.summary import asked, cost, facts, spent
from harness.errors import one_line
from harness.store.files import write_atomic

PAGE_FILE = "bisect.md"


def keep_page(folder: Path, findings: Findings) -> Path:
    """Write the page; its path.

    Raises:
        Infrastructure: the disk refused.
    """
    path = folder / PAGE_FILE
    write_atomic(path, page(findings))
    return path


def page(findings: Findings) -> str:
    """The page as Markdown; nothing from outside is read as markup."""
    lines = [f"# {_code(findings.case_id)}: {findings.outcome} {findings.what}".rstrip(), ""]
    for told in findings.environment:
        lines += [f"**Environment:** {_plain(told)}", ""]
    if findings.stopped:
        lines += [f"**Not finished:** {_plain(findings.stopped)}", ""]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {name} | {_cell(text)} |" for name, text in facts(findings)]
    lines += ["", f"Verdict: {_plain(findings.message)}", ""]
    place = findings.place
    if place is not None:
        lines += _section("Evidence", place.evidence, numbered=True)
        lines += _section("Not known", place.unknown)
    if findings.causes is not None:
        sure = [str(findings.causes.patience)] if findings.causes.patience else []
        lines += _section("Causes", [*sure, *findings.causes.notes])
    if findings.least_case is not None:
        lines += _section("Least case", [*findings.least_case.made, *findings.least_case.notes])
    if findings.commits is not None:
        lines += _section("Commits", [findings.commits.patience, *findings.commits.notes])
    questions = [f"{asked(q.words)} {q.answer}{cost(q)}" for q in findings.questions]
    lines += _section(f"Asked ({spent(findings)})", questions, numbered=True)
    lines += ["## Again", "", f"    {one_line(findings.command)}", ""]
    return "\n".join(lines)


def _section(
    title: str, items: tuple[str, ...] | list[str], *, numbered: bool = False
) -> list[str]:
    if not items:
        return []
    marks = [f"{i}." for i in range(1, len(items) + 1)] if numbered else ["-"] * len(items)
    return [
        f"## {title}", "",
        *(f"{mark} {_plain(item)}" for mark, item in zip(marks, items, strict=True)), "",
    ]  # fmt: skip


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    escaped = one_line(text)
    for mark in "\\`*_[]<>#|":
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped


def _cell(text: str) -> str:
    return _plain(text)


def _code(text: str) -> str:
    return f"`{one_line(text).replace('`', '')}`"
