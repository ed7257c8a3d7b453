"""One terminal screen: what, where and the first wrong thing in its first lines."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.bisector.findings import Findings
from harness.bisector.summary import facts, spent
from harness.display import cell
from harness.progress import COLOURS
from harness.typed import typed

WIDTH = 80
MOST_EVIDENCE = 8


def print_findings(console: Console, findings: Findings, page: Path) -> None:
    """Print the answer; the rest is on the page."""
    width = min(console.width, WIDTH)
    told = f"{findings.outcome} {findings.what}".rstrip()
    head = Text(told, style=COLOURS[findings.outcome])
    head.append_text(cell(f"  {findings.case_id}", "bold"))
    console.print(head, soft_wrap=True)
    for told in findings.environment:
        console.print(cell(told, "yellow"), width=width)
    if findings.place is None:
        console.print(cell(findings.message), width=width)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, (name, text) in enumerate(facts(findings)):
        table.add_row(
            cell(name, "dim"), cell(typed(text), "bold" if number < 2 or name == "element" else "")
        )
    console.print(table, width=width)
    if findings.stopped:
        console.print(cell(f"not finished: {findings.stopped}", "yellow"), width=width)
    place = findings.place
    if place is not None:
        _print_list(console, "evidence", place.evidence, width)
        _print_list(console, "not known", place.unknown, width)
    console.print(cell(f"{spent(findings)}; page {page}", "dim"), soft_wrap=True)
    console.print(cell(f"again: {typed(findings.command)}", "dim"), soft_wrap=True)


def _print_list(console: Console, title: str, items: tuple[str, ...], width: int) -> None:
    if not items:
        return
    console.print(cell(title, "dim"))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, item in enumerate(items[:MOST_EVIDENCE], 1):
        table.add_row(cell(f"  {number}."), cell(item))
    if len(items) > MOST_EVIDENCE:
        table.add_row(cell(""), cell(f"{len(items) - MOST_EVIDENCE} more on the page"))
    console.print(table, width=width)
