"""What may differ between two reports of the same results: times, attempts, where the folder lies.

    index.html   elements with `data-varies`: time, attempts, history; also in the packed details
    report.md    the line that starts with `Times:`, what is between marks of attempts and times
    junit.xml    the attributes `time` and `timestamp`, the elements of earlier attempts
    report.json  the keys `times` and `attempts`, and every `wall_s`

Two runs of one scenario that came to the same answers are equal once this is taken away.
"""

import base64
import html
import json
import re
import zlib
from pathlib import Path
from typing import Any

PLACE = "RUN-FOLDER"
_VARYING_KEYS = ("times", "attempts", "wall_s")
# Such an element holds none of its own kind.
_VARYING = re.compile(r'\s*<(\w+)[^<>]* data-varies="\w+"[^<>]*>.*?</\1>', re.DOTALL)
_PACKED = re.compile(r'(<script type="text/plain" id="packed">)([^<]*)(</script>)')


def normalise(name: str, text: str, folder: Path) -> str:
    """A report file's text without times and without its folder's path.

    Args:
        name: file name, which tells the format.
        text: contents of the file.
        folder: the run folder that was reported.
    """
    if name.endswith(".html"):
        text = _PACKED.sub(lambda found: found[1] + _unpacked(found[2]) + found[3], text)
    text = _placed(text, folder)
    if name.endswith(".html"):
        return re.sub(r"\n\s*\n", "\n", _VARYING.sub("", text))
    if name.endswith(".md"):
        for mark in (attempts_mark, times_mark):
            text = re.sub(mark("(?s:.)*?") + r"\n*", "", text)
        return re.sub(r"^Times: .*$", "", text, flags=re.MULTILINE)
    if name.endswith(".xml"):
        text = re.sub(
            r"\s*<((?:flaky|rerun)(?:Error|Failure))\b.*?</\1>", "", text, flags=re.DOTALL
        )
        return re.sub(r' (time|timestamp)="[^"]*"', "", text)
    if name.endswith(".json"):
        return json.dumps(_without_times(json.loads(text)), indent=1, sort_keys=True)
    raise ValueError(f"name: expected .html, .md, .xml or .json, got {name!r}")


def steady(text: str, folder: Path) -> str:
    """A part of a page without what varies: what has a budget is measured by this."""
    return _VARYING.sub("", _placed(text, folder))


def _placed(text: str, folder: Path) -> str:
    for written in {str(folder), html.escape(str(folder)), json.dumps(str(folder))[1:-1]}:
        text = text.replace(written, PLACE)
    # A path that had to be quoted for the shell is the same place as one that had not.
    return re.sub(rf"('|&#39;)({PLACE}[A-Za-z0-9_+=,@./-]*)\1", r"\2", text)


def attempts_mark(text: str) -> str:
    """Markdown that tells of attempts, marked so that it can be taken away."""
    return f"<!-- attempts -->{text}<!-- /attempts -->"


def times_mark(text: str) -> str:
    """Markdown that tells of times, marked alike."""
    return f"<!-- times -->{text}<!-- /times -->"


def _unpacked(packed: str) -> str:
    """The details of cases as lines of JSON; what does not unpack stands as it is."""
    try:
        text = zlib.decompress(base64.b64decode(packed)).decode()
        return json.dumps(
            {case: _VARYING.sub("", body) for case, body in json.loads(text).items()}, indent=1
        )
    except (ValueError, zlib.error):
        return packed


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if k not in _VARYING_KEYS}
    return [_without_times(entry) for entry in value] if isinstance(value, list) else value
