"""Reports of a run folder.

    frames > summary > figures > html, markdown, junit, json_report

Everything is read once into a `summary.Report`; the four formats only show it, and what the history
says of its cases beside it.
"""

from pathlib import Path

from harness.disk import write_atomic
from harness.errors import Infrastructure
from reports import html, json_report, junit, markdown, step_summary
from reports.history import look_back
from reports.normalise import normalise
from reports.sameness import differences, keep, normalised
from reports.report import summarise
from reports.text import well_formed

__all__ = ["REPORT_FOLDER", "build", "differences", "keep", "normalise", "normalised"]

REPORT_FOLDER = "report"


def build(
    run_folder: Path, *, history: Path | None = None, step: Path | None = None
) -> dict[str, Path]:
    """Write the report of a run folder: `html`, `markdown`, `junit` and `json`, by format.

    Args:
        run_folder: what to report.
        history: where nights before are looked up; None for the history beside the folder.
        step: file to which a summary is added for the CI step that asked for one; None for none.

    Raises:
        UsageError: not a run folder, or damaged beyond reading.
        Infrastructure: the report cannot be written.
    """
    report = summarise(run_folder)
    nights = look_back(report.folder, report.scenario, report.created, history)
    folder = report.folder / REPORT_FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise Infrastructure(f"cannot make folder {folder}: {error.strerror or error}") from error
    texts = {
        "html": ("index.html", html.render(report, nights)),
        "markdown": ("report.md", markdown.render(report)),
        "junit": ("junit.xml", junit.render(report)),
        "json": ("report.json", json_report.render(report)),
    }
    for name, text in texts.values():
        write_atomic(folder / name, well_formed(text))
    if step is not None:
        step_summary.add(step, report)
    return {form: folder / name for form, (name, _) in texts.items()}
