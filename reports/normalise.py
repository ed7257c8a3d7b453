"""What may differ between two reports of the same results: times, and where the folder lies.

    index.html   the footer `data-varies="time"`
    report.md    the line that starts with `Times:`
    junit.xml    the attributes `time` and `timestamp`
    report.json  the key `times` and every `wall_s`

Two runs of one scenario that came to the same answers are equal once this is taken away.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

PLACE = "RUN-FOLDER"


def normalise(name: str, text: str, folder: Path) -> str:
    """A report file's text without times and without its folder's path.

    Args:
        name: file name, which tells the format.
        text: contents of the file.
        folder: the run folder that was reported.
    """
    for written in {str(folder), html.escape(str(folder)), json.dumps(str(folder))[1:-1]}:
        text = text.replace(written, PLACE)
    # A path that had to be quoted for the shell is the same place as one that had not.
    text = re.sub(rf"('|&#39;)({PLACE}[A-Za-z0-9_+=,@./-]*)\1", r"\2", text)
    if name.endswith(".html"):
        return re.sub(r'<footer data-varies="time">.*?</footer>', "", text, flags=re.DOTALL)
    if name.endswith(".md"):
        return re.sub(r"^Times: .*$", "", text, flags=re.MULTILINE)
    if name.endswith(".xml"):
        return re.sub(r' (time|timestamp)="[^"]*"', "", text)
    if name.endswith(".json"):
        return json.dumps(_without_times(json.loads(text)), indent=1, sort_keys=True)
    raise ValueError(f"name: expected .html, .md, .xml or .json, got {name!r}")


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if k not in ("times", "wall_s")}
    return [_without_times(entry) for entry in value] if isinstance(value, list) else value
