"""Reports of a run folder.

    frames > summary > figures > html, markdown, junit, json_report

Everything is read once into a `summary.Report`; the four formats only show it.
"""

from pathlib import Path

from harness.disk import write_atomic
from harness.errors import Infrastructure
from reports import html, json_report, junit, markdown
from reports.normalise import normalise
from reports.summary import summarise
from reports.text import well_formed

__all__ = ["REPORT_FOLDER", "build", "normalise"]

REPORT_FOLDER = "report"


def build(run_folder: Path) -> dict[str, Path]:
    """Write the report of a run folder: `html`, `markdown`, `junit` and `json`, by format.

    Raises:
        UsageError: not a run folder, or damaged beyond reading.
        Infrastructure: the report cannot be written.
    """
    report = summarise(run_folder)
    folder = report.folder / REPORT_FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise Infrastructure(f"cannot make folder {folder}: {error.strerror or error}") from error
    texts = {
        "html": ("index.html", html.render(report)),
        "markdown": ("report.md", markdown.render(report)),
        "junit": ("junit.xml", junit.render(report)),
        "json": ("report.json", json_report.render(report)),
    }
    for name, text in texts.values():
        write_atomic(folder / name, well_formed(text))
    return {form: folder / name for form, (name, _) in texts.items()}
