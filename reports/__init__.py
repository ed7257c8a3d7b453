"""Reports of a run folder.

    compared > reading > safety > html, markdown, junit, json_report

Everything is read once into a `reading.Report`; the four formats only show it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.store.files import make_folder, write_atomic
from reports import html, json_report, junit, markdown, safety
from reports.reading import Report, summarise
from reports.text import well_formed

__all__ = ["REPORT_FOLDER", "build", "summarise", "tables_of_safety"]

REPORT_FOLDER = "report"


def build(
    run_folder: Path, *, history: Path | None = None, step: Path | None = None
) -> dict[str, Path]:
    """Write the report of a run folder: `html`, `markdown`, `junit` and `json`, by format.

    `history` is where earlier runs are looked up (None: next to the folder); `step` a file to which
    a summary is added for the CI step that asked for one. `UsageError`: not a run folder, or
    damaged beyond reading. `Infrastructure`: the report cannot be written.
    """
    report = summarise(run_folder, history)
    folder = report.folder / REPORT_FOLDER
    make_folder(folder)
    made = {"html": ("index.html", html), "markdown": ("report.md", markdown),
            "junit": ("junit.xml", junit), "json": ("report.json", json_report)}  # fmt: skip
    texts = {name: form.render(report) for name, form in made.values()}
    for name, text in texts.items():
        write_atomic(folder / name, well_formed(text))
    if step is not None:
        markdown.add_to_step(step, report)
    return {form: folder / name for form, (name, _) in made.items()}


def tables_of_safety(reports: Iterable[Report]) -> tuple[list[dict[str, Any]], str]:
    """What is safe by package, version and combination (`reports.safety`), as JSON and Markdown."""
    found = safety.tables(reports)
    return [table.to_json() for table in found], markdown.of_safety(found)
