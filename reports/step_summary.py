"""The summary of a CI step: the Markdown of the run, added to the file that the CI shows.

GitHub Actions takes 1 MiB a step and drops a larger file whole, so the room that is left decides.
"""

from pathlib import Path

from harness.errors import Infrastructure
from reports import markdown
from reports.report import Report
from reports.text import well_formed

MAX_FILE_BYTES = (1 << 20) - 4096
MIN_BYTES = 4096
"""Less than this is not worth a summary: one line says so."""


def add(path: Path, report: Report) -> None:
    """Add the run's summary to the file; nothing that is in it is changed.

    Raises:
        Infrastructure: the file cannot be written.
    """
    try:
        left = MAX_FILE_BYTES - (path.stat().st_size if path.exists() else 0)
        if left < MIN_BYTES:
            text = f"{markdown.escape(report.headline)}: no room is left here, see report.md\n"
        else:
            text = markdown.render(report, max_bytes=left)
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + well_formed(text))
    except OSError as error:
        raise Infrastructure(f"cannot write {path}: {error.strerror or error}") from error
