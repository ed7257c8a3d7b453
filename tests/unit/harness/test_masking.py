"""Secrets are masked, and nothing else is."""

import base64
import json
import os
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from harness.engine.ranks import TAIL_BYTES, CappedOutput
from harness.masking import MASK, MAX_HELD_BYTES, Masker, Stream
from harness.provenance import variables

SECRET = "correct-horse-battery"
ENVIRON = {"MY_SERVICE_TOKEN": SECRET, "HOME": "/home/somebody", "SHORT_SECRET": "abc"}
TOKENS = (
    "ghp_" + "a1B2" * 9,
    "glpat-" + "a1B2c3" * 4,
    "hf_" + "a1B2" * 8,
    "AKIA" + "ABCDEFGH12345678",
    "eyJ" + "hbGciOi1" * 3 + ".eyJ" + "zdWIiOi2" * 3 + "." + "sflKx3" * 5,
)  # fmt: skip


@pytest.mark.parametrize("token", [SECRET, *TOKENS])
def test_secrets_are_masked_wherever_they_stand(token: str) -> None:
    """In text, in bytes, in a command line: the value is gone and the rest is there."""
    masker = Masker(ENVIRON)
    text = f"before {token} after, x={token!r}"
    assert masker.text(text) == f"before {MASK} after, x={MASK!r}"
    assert masker.data(text.encode()) == masker.text(text).encode()
    assert masker.words(["run", f"--set=a={token}", token]) == ["run", f"--set=a={MASK}", MASK]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:s3cr3tpass@host/x", f"https://me:{MASK}@host/x"),
        ("password=s3cr3ts3cr3t1 next", f"password={MASK} next"),
        ("Authorization: Bearer s3cr3ts3cr3t1", f"Authorization: Bearer {MASK}"),
        ('{"api_key": "s3cr3ts3cr3t1"}', f'{{"api_key": "{MASK}"}}'),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nx", f"{MASK}\nx"),
    ],
)
def test_what_is_assigned_to_a_telling_name_is_masked(text: str, masked: str) -> None:
    """Passwords in URLs, in settings and in headers."""
    assert Masker({}).text(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "4096 tokens: 512 a rank", "tokens=1024", "token_embedding.weight", "layers.3.attn:output",
        "rank 3, digest 58e03d6b8a1c4e2f58e03d6b8a1c4e2f", "http://127.0.0.1:29500/store",
        "token: checkpoint_of_step_12", "HOME=/home/somebody", "abc", "the password is wrong",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ],
)  # fmt: skip
def test_what_is_no_secret_is_kept(text: str) -> None:
    """Words of training are not secrets, and neither are values too short to be one."""
    assert Masker(ENVIRON).text(text) == text


def test_an_option_that_tells_is_masked_with_its_word() -> None:
    """`--hub-token VALUE` is masked whatever the value looks like."""
    assert Masker({}).words(["x", "--hub-token", "plainvalue"]) == ["x", "--hub-token", MASK]
    assert Masker({}).words(["x", "--jobs", "12345678"]) == ["x", "--jobs", "12345678"]


@pytest.mark.parametrize("size", [1, 3, 7, 4096])
def test_a_secret_that_arrives_in_pieces_is_masked(size: int) -> None:
    """However the output is cut, what comes out is what masking the whole would give."""
    masker = Masker(ENVIRON)
    data = f"one {SECRET}\ntwo\n{SECRET}{SECRET}\nlast {SECRET}".encode()
    stream = Stream(masker)
    parts = [stream.take(data[i : i + size]) for i in range(0, len(data), size)]
    assert b"".join([*parts, stream.rest()]) == masker.data(data)


def test_a_line_without_an_end_is_not_held_for_ever() -> None:
    """Memory is bounded, and a secret in the middle of such a line is masked all the same."""
    stream = Stream(Masker(ENVIRON))
    pieces = [b"x" * 1000 + b" "] * 200
    pieces[100] = SECRET.encode() + b" "
    out = bytearray()
    for piece in pieces:
        out += stream.take(piece)
        assert len(stream._held) <= MAX_HELD_BYTES + 1001
    out += stream.rest()
    assert bytes(out) == b"".join(pieces).replace(SECRET.encode(), MASK.encode())


def test_output_of_a_rank_is_masked_head_and_tail(tmp_path: Path) -> None:
    """Not one byte of a secret reaches the file, in its head, across its cap, or in its tail."""
    for cap_bytes in (*range(0, 120, 7), 1 << 20):
        read_fd, write_fd = os.pipe()
        output = CappedOutput(
            read_fd, tmp_path / "out", cap_bytes=cap_bytes, masker=Masker(ENVIRON)
        )
        os.write(write_fd, f"{SECRET}\nhead\n".encode())
        output.drain()
        os.write(write_fd, (f"more {SECRET} of it\n" * 3).encode())
        output.drain()
        os.write(write_fd, f"the end {SECRET}".encode())
        os.close(write_fd)
        output.close()
        written = (tmp_path / "out").read_text()
        assert SECRET not in written
        assert "correct-horse" not in written
        whole = re.sub(r"\n\[harness: .*\]\n", "", written)
        assert whole.endswith("the end ***")


def test_the_stored_environment_holds_no_secret() -> None:
    """Variables are stored by a list of names, never one that tells of a secret, values masked."""
    environ = ENVIRON | {
        "NCCL_ALGO": "Ring", "TORCH_HUB_TOKEN": "another-secret-1", "NCCL_IB_HCA": SECRET,
        "AWS_SESSION_TOKEN": "not-listed-at-all",
    }  # fmt: skip
    assert variables(environ) == {"NCCL_ALGO": "Ring", "NCCL_IB_HCA": MASK}


@pytest.mark.parametrize(
    "name", ["DB_PASS", "MYSQL_PWD", "AWS_CREDS", "SENTRY_DSN", "SLACK_WEBHOOK", "SESSION_JWT"]
)
def test_more_names_tell(name: str) -> None:
    """Names that end in what secrets are called."""
    assert Masker({name: SECRET}).text(f"x {SECRET} y") == f"x {MASK} y"


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "SPASS", "KEYBOARD", "PASS_RATE", "HOSTPIN"])
def test_names_that_only_look_like_it_do_not_tell(name: str) -> None:
    """Their values are paths and numbers."""
    assert Masker({name: SECRET}).text(f"x {SECRET} y") == f"x {SECRET} y"


KEY_LINES = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow1BAAKCAQEA\n" * 20 + "-----END RSA-----\n"


def test_a_secret_is_known_in_the_forms_that_it_is_printed_in() -> None:
    """By lines, as URLs, JSON, `repr` and base64 have it; the password that is in a URL alone."""
    value = 'first line/1+x\nsecond "line" 2'
    environ = {"A_SECRET": value, "DATABASE_URL": "postgres://me:w0rd+of:it@host/db"}
    masker = Masker(environ)
    coded = base64.b64encode(value.encode()).decode()
    for text in (
        *value.split("\n"), json.dumps(value), repr(value), quote(value), quote(value, safe=""),
        coded, "w0rd+of:it",
    ):  # fmt: skip
        for part in ("first", "second", "line", coded[:10], "w0rd"):
            assert part not in masker.text(f"say {text} now"), text
        assert masker.text(f"say {text} now").endswith(" now")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("pw hunter2, hunter22 and xhunter2", f"pw {MASK}, hunter22 and xhunter2"),
        ("https://:s3cr3t@host", f"https://:{MASK}@host"),
        ("HTTPS://me:p@ss:word@host/x@y", f"HTTPS://me:{MASK}@host/x@y"),
        ("https://0123456789abcdef0123@host/x", f"https://{MASK}@host/x"),
        ("https://user@host/x", "https://user@host/x"),
        ("password=sesame next", f"password={MASK} next"),
        ("password: wrong", "password: wrong"),
        ("password: op3n!", f"password: {MASK}"),
        ("password=None", "password=None"),
        ("token=s3cr3ts3cr3t1", f"token={MASK}"),
        ("db_pwd=op3n client_secret: op3n", f"db_pwd={MASK} client_secret: {MASK}"),
        ("basic block2 and secret: layer3", "basic block2 and secret: layer3"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZDE=", f"Authorization: Basic {MASK}"),
        ("glrt-" + "a1B2c3" * 4, MASK),
        ("https://hooks.slack.com/services/T0/B0/abcdefgh1234",
         f"https://{MASK}"),
    ],
)  # fmt: skip
def test_more_forms_of_secrets(text: str, masked: str) -> None:
    """Short ones as words of their own, more of URLs, of assignments and of services."""
    assert Masker({"LOGIN_PASSWORD": "hunter2", "A_TOKEN": "true", "B_TOKEN": "1234"}).text(
        text
    ) == masked  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 33, 400])
def test_a_key_in_pem_is_masked_whatever_its_pieces(size: int) -> None:
    """Its lines arrive one by one: none is stored before it is known to be of a key."""
    data = f"before\n{KEY_LINES}after\n".encode()
    stream = Stream(Masker({}))
    parts = [stream.take(data[i : i + size]) for i in range(0, len(data), size)]
    assert b"".join([*parts, stream.rest()]) == f"before\n{MASK}\nafter\n".encode()


@pytest.mark.parametrize("secret", ["a pass phrase of words", TOKENS[0], "x" * 100 + SECRET])
def test_a_line_that_is_too_long_is_cut_beside_a_secret(secret: str) -> None:
    """Also beside one with spaces in it, or in a line without any."""
    masker = Masker({"A_SECRET": "a pass phrase of words", "B_SECRET": "x" * 100 + SECRET})
    for beyond in range(-len(secret) - 20, 20, 7):
        # The cut is this many bytes beyond the end of the secret.
        data = b"y" * MAX_HELD_BYTES + b"," + secret.encode() + b","
        data += b"z" * (MAX_HELD_BYTES // 2 + beyond)
        stream = Stream(masker)
        out = stream.take(data) + stream.rest()
        assert out == data.replace(secret.encode(), MASK.encode())


@pytest.mark.parametrize("line", [f"{SECRET}\n", f"a {SECRET};", f"password={TOKENS[0]} "])
def test_the_end_of_a_flood_of_secrets_begins_with_no_part_of_one(
    line: str, tmp_path: Path
) -> None:
    """Masking makes such an end much shorter: what stands at its beginning must not move in."""
    masker = Masker(ENVIRON)
    for beyond in range(len(line)):
        read_fd, write_fd = os.pipe()
        output = CappedOutput(read_fd, tmp_path / "out", cap_bytes=0, masker=masker)
        data = line.encode() * (TAIL_BYTES * 2 // len(line)) + b"." * beyond
        view = memoryview(data)
        while view:
            view = view[os.write(write_fd, view[: 1 << 16]) :]
            output.drain()
        os.close(write_fd)
        output.close()
        _, _, tail = (tmp_path / "out").read_bytes().partition(b" follow]\n")
        assert len(tail) > 1000
        assert masker.data(data).endswith(tail)
