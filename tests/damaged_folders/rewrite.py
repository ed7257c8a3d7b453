"""Files of one object, changed by somebody who does or does not care for their checksum."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.store.files import KEY, with_checksum


def rewrite(path: Path, changes: Mapping[str, Any]) -> None:
    """Change an object, and its checksum with it."""
    plain = json.loads(path.read_bytes()) | changes
    plain.pop(KEY, None)
    path.write_text(json.dumps(with_checksum(plain)))
