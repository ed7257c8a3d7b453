"""A headless Chromium, told what to do over two pipes: JSON messages, each ended by a zero byte.

The protocol is Chromium's DevTools protocol; `--remote-debugging-pipe` needs no port and no client.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
)  # fmt: skip


def find_browser() -> str | None:
    """The path of a browser; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser with one page."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # The protocol is spoken on descriptors 3 and 4.
        command = [
            "/bin/sh", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}', program, *_OPTIONS,
            f"--user-data-dir={self._profile.name}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._unread, self._session = 0, b"", ""
        targets = self.ask("Target.getTargets")["targetInfos"]
        (page,) = (target for target in targets if target["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self.ask("Page.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def ask(self, method: str, **params: Any) -> Any:
        """The browser's answer to one request; events before it are passed over.

        Raises:
            RuntimeError: the browser refused, or has gone.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._unread:
            data = os.read(self._from, 1 << 20)
            if not data:
                raise RuntimeError("the browser has gone")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)

    def open(self, address: str, *, width: int, height: int) -> None:
        """Open a page and wait until it is loaded."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        # A change of the fragment alone loads nothing.
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=address)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """The value of an expression, or of its promise, as JSON has it."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.ask("Runtime.evaluate", expression=script, **how)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:1000])
        return answer["result"].get("value")

    def picture(self, place: Path) -> None:
        """What is seen of the page."""
        place.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))
