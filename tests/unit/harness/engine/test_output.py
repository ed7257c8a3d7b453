"""What a rank prints is stored up to a limit, and its end always."""

import os
import threading
from pathlib import Path

from harness.engine.ranks import TAIL_BYTES, CappedOutput


def pump(output: CappedOutput, write_fd: int, data: bytes) -> None:
    """Write `data` from another thread while draining; then close."""

    def write() -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(write_fd, view) :]
        os.close(write_fd)

    writer = threading.Thread(target=write)
    writer.start()
    os.set_blocking(output.read_fd, True)
    while output.drain():
        pass
    writer.join()
    output.close()


def test_short_output_is_stored_as_it_is(tmp_path: Path) -> None:
    """Below the cap the file is exactly what was printed."""
    read_fd, write_fd = os.pipe()
    pump(CappedOutput(read_fd, tmp_path / "out", cap_bytes=100), write_fd, b"\x00hello\n" * 3)
    assert (tmp_path / "out").read_bytes() == b"\x00hello\n" * 3


def test_a_flood_keeps_its_head_and_its_end_and_says_what_is_gone(tmp_path: Path) -> None:
    """Above the cap the file holds the head, the number of bytes dropped, and the tail."""
    read_fd, write_fd = os.pipe()
    data = b"head" + os.urandom(3 * TAIL_BYTES) + b"last words"
    pump(CappedOutput(read_fd, tmp_path / "out", cap_bytes=4), write_fd, data)
    stored = (tmp_path / "out").read_bytes()
    dropped = len(data) - 4 - TAIL_BYTES
    assert stored.startswith(b"head\n[harness: output above 4 bytes: %d bytes dropped" % dropped)
    assert stored.endswith(data[-TAIL_BYTES:])
    assert len(stored) < 4 + TAIL_BYTES + 200


def test_exactly_the_cap_drops_nothing(tmp_path: Path) -> None:
    """Output as long as the cap is stored whole, without a remark."""
    read_fd, write_fd = os.pipe()
    pump(CappedOutput(read_fd, tmp_path / "out", cap_bytes=8), write_fd, b"12345678")
    assert (tmp_path / "out").read_bytes() == b"12345678"


def test_close_does_not_wait_for_a_stray_writer(tmp_path: Path) -> None:
    """Output that somebody else still holds open is closed with what has arrived."""
    read_fd, write_fd = os.pipe()
    output = CappedOutput(read_fd, tmp_path / "out")
    os.write(write_fd, b"so far")
    output.close()
    output.close()
    os.close(write_fd)
    assert (tmp_path / "out").read_bytes() == b"so far"


def test_a_full_disk_is_noted_and_draining_goes_on() -> None:
    """The rank is not blocked by a disk that takes no more, and the loss is on record."""
    read_fd, write_fd = os.pipe()
    output = CappedOutput(read_fd, Path("/dev/full"))
    pump(output, write_fd, b"x" * 300_000)
    assert "No space left" in output.problem
