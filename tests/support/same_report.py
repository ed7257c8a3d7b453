"""What two run folders with the same results have alike in their report.json."""

import json
import re
from pathlib import Path
from typing import Any

VARYING = ("run", "times", "attempts", "wall_s")
"""Keys that differ between two run folders with the same results."""
PLACE = "RUN-FOLDER"


def normalised(path: Path, folder: Path) -> str:
    """The text of a report.json of `folder` without `VARYING` and the folder's path."""
    place = json.dumps(str(folder.absolute()))[1:-1]
    # A path that had to be quoted for the shell is the same place as one that had not.
    quoted = re.compile(rf"'{PLACE}([A-Za-z0-9_+=,@./-]*)'")
    text = quoted.sub(rf"{PLACE}\1", path.read_text("utf-8").replace(place, PLACE))
    return json.dumps(_without_varying(json.loads(text)), indent=1, sort_keys=True)


def _without_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_varying(v) for k, v in value.items() if k not in VARYING}
    return [_without_varying(entry) for entry in value] if isinstance(value, list) else value
