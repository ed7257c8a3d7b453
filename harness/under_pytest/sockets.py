"""How workers of pytest-xdist reach the service of their controller: one question a connection.

    {"file": ..., "case": ...}  ->  {"answer": Answer}  or  {"error": words}

The socket has a name of the kernel's (abstract, `unix(7)`) and no file, so a controller that is
killed leaves nothing behind; whoever connects has to be this user. A worker that dies takes nothing
with it: slots belong to runs, and runs to the controller.
"""

import json
import os
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, Infrastructure
from harness.under_pytest.service import Answer

Ask = Callable[[Path, str], Answer]


_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: process, user, group."""


class _Listener(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 1024

    def verify_request(self, request: object, client_address: object) -> bool:
        """Hear nobody but this user: a name of the kernel's has no permissions."""
        assert isinstance(request, socket.socket)
        told = request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(told)
        return bool(user == os.geteuid())


class CaseServer:
    """Answers questions on a socket until it is closed."""

    def __init__(self, ask: Ask) -> None:
        """Listen; `address` is what `ask_at` takes."""
        self.address = f"harness-{secrets.token_hex(16)}"

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                question = self.rfile.readline()
                if question:
                    self.wfile.write(json.dumps(_reply(ask, question)).encode() + b"\n")

        self._listener = _Listener(_of_the_kernel(self.address), Handler)
        self._thread = threading.Thread(target=self._listener.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()


def _of_the_kernel(address: str) -> str:
    return f"\0{address}"


def _reply(ask: Ask, question: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(question)
        return {"answer": ask(Path(asked["file"]), asked["case"]).to_json()}
    except HarnessError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - the test that asked fails with it
        return {"error": f"internal error: {type(error).__name__}: {error}"}


def ask_at(address: str) -> Ask:
    """A function that asks the service behind a socket."""

    def ask(file: Path, case_id: str) -> Answer:
        question = json.dumps({"file": str(file), "case": case_id}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(_of_the_kernel(address))
                line.sendall(question)
                with line.makefile("rb") as stream:
                    told = json.loads(stream.readline())
        except (OSError, ValueError) as error:
            raise Infrastructure(
                f"the controller of pytest-xdist does not answer at {address}: {error}; workers "
                "have to be on its machine"
            ) from error
        if "error" in told:
            raise Infrastructure(told["error"])
        return Answer.from_json(told["answer"])

    return ask
