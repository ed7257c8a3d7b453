"""Secrets are masked, and nothing else is."""

import os
import re
from pathlib import Path

import pytest

from harness.engine.ranks import TAIL_BYTES, CappedOutput
from harness.masking import MASK, MAX_HELD_BYTES, Masker
from harness.provenance import variables

SECRET = "correct-horse-battery"
ENVIRON = {
    "MY_SERVICE_TOKEN": SECRET, "HOME": "/home/somebody", "SHORT_SECRET": "abc",
    "LOGIN_PASSWORD": "hunter2", "A_TOKEN": "true", "B_TOKEN": "1234",
    "DATABASE_URL": "postgres://me:w0rd+of:it@host/db",
}  # fmt: skip
TOKENS = (
    SECRET, "ghp_" + "a1B2" * 9, "glpat-" + "a1B2c3" * 4, "glrt-" + "a1B2c3" * 4,
    "hf_" + "a1B2" * 8, "AKIA" + "ABCDEFGH12345678",
    "eyJ" + "hbGciOi1" * 3 + ".eyJ" + "zdWIiOi2" * 3 + "." + "sflKx3" * 5,
)  # fmt: skip
PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEow1BAAKCAQEA\n" * 20 + "-----END RSA-----\n"
KEPT = (
    "4096 tokens: 512 a rank", "tokens=1024", "token_embedding.weight", "layers.3.attn:output",
    "rank 3, digest 58e03d6b8a1c4e2f58e03d6b8a1c4e2f", "http://127.0.0.1:29500/store",
    "token: checkpoint_of_step_12", "HOME=/home/somebody", "abc", "the password is wrong",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "https://user@host/x", "password: wrong", "password=None", "basic block2 and secret: layer3",
    "hunter22 and xhunter2", "true 1234",
)  # fmt: skip
MASKED = {
    "https://me:s3cr3tpass@host/x": f"https://me:{MASK}@host/x",
    "https://:s3cr3t@host": f"https://:{MASK}@host",
    "HTTPS://me:p@ss:word@host/x@y": f"HTTPS://me:{MASK}@host/x@y",
    "https://0123456789abcdef0123@host/x": f"https://{MASK}@host/x",
    "https://hooks.slack.com/services/T0/B0/abcdefgh1234": f"https://{MASK}",
    "password=s3cr3ts3cr3t1 next": f"password={MASK} next",
    "password=sesame next": f"password={MASK} next",
    "password: op3n!": f"password: {MASK}",
    "token=s3cr3ts3cr3t1": f"token={MASK}",
    "db_pwd=op3n client_secret: op3n": f"db_pwd={MASK} client_secret: {MASK}",
    "Authorization: Bearer s3cr3ts3cr3t1": f"Authorization: Bearer {MASK}",
    "Authorization: Basic dXNlcjpwYXNzd29yZDE=": f"Authorization: Basic {MASK}",
    '{"api_key": "s3cr3ts3cr3t1"}': f'{{"api_key": "{MASK}"}}',
    f"{PEM}x": f"{MASK}\nx",
    "pw hunter2, x": f"pw {MASK}, x",
    "say w0rd+of:it": f"say {MASK}",
}  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_secrets_are_masked_wherever_they_stand(token: str) -> None:
    """In text, in bytes, in a command line: the value is gone and the rest is there."""
    masker = Masker(ENVIRON)
    text = f"before {token} after, x={token!r}"
    assert masker.text(text) == f"before {MASK} after, x={MASK!r}"
    assert masker.data(text.encode()) == masker.text(text).encode()
    assert masker.words(["run", f"--set=a={token}", token]) == ["run", f"--set=a={MASK}", MASK]


@pytest.mark.parametrize(("text", "masked"), [*MASKED.items(), *((text, text) for text in KEPT)])
def test_forms_of_secrets_are_told_from_words_of_training(text: str, masked: str) -> None:
    """URLs, assignments, headers, keys and short words of their own; nothing else."""
    assert Masker(ENVIRON).text(text) == masked


@pytest.mark.parametrize(
    ("name", "tells"),
    [*((name, True) for name in ("DB_PASS", "MYSQL_PWD", "AWS_CREDS", "SENTRY_DSN", "SLACK_WEBHOOK",
                                 "SESSION_JWT")),
     *((name, False) for name in ("PWD", "OLDPWD", "SPASS", "KEYBOARD", "PASS_RATE", "HOSTPIN"))],
)  # fmt: skip
def test_which_names_tell(name: str, tells: bool) -> None:
    """Names that end in what secrets are called; those that only look like it are kept."""
    assert Masker({name: SECRET}).text(f"x {SECRET} y") == f"x {MASK if tells else SECRET} y"


def test_the_stored_environment_holds_no_secret() -> None:
    """Variables are stored by a list of names, never one that tells of a secret, values masked."""
    more = {"NCCL_ALGO": "Ring", "TORCH_HUB_TOKEN": "another-secret-1", "NCCL_IB_HCA": SECRET,
            "AWS_SESSION_TOKEN": "not-listed-at-all"}  # fmt: skip
    assert variables(ENVIRON | more) == {"NCCL_ALGO": "Ring", "NCCL_IB_HCA": MASK}


def output(path: Path, writes: bytes, *, cap_bytes: int = 1 << 30, size: int = 1 << 15) -> bytes:
    """What is stored of a rank that writes this, in pieces of that size."""
    read_fd, write_fd = os.pipe()
    capped = CappedOutput(read_fd, path, cap_bytes=cap_bytes, masker=Masker(ENVIRON))
    for at in range(0, len(writes), size):
        os.write(write_fd, writes[at : at + size])
        capped.drain()
    os.close(write_fd)
    capped.close()
    return path.read_bytes()


@pytest.mark.parametrize("size", [1, 7, 33, 4096])
def test_what_arrives_in_pieces_is_masked_as_a_whole(size: int, tmp_path: Path) -> None:
    """However the output is cut; the lines of a key are not stored before it is known."""
    masker = Masker(ENVIRON)
    data = f"one {SECRET}\ntwo\n{PEM}after\n{SECRET}{SECRET}\nlast {SECRET}".encode()
    assert output(tmp_path / "out", data, size=size) == masker.data(data)
    assert masker.data(data).count(MASK.encode()) == 5


def test_a_line_without_an_end_is_not_held_for_ever(tmp_path: Path) -> None:
    """Memory is bounded, and a secret in the middle of such a line is masked all the same."""
    pieces = [b"x" * 1000 + b" "] * 200
    pieces[100] = SECRET.encode() + b" "
    whole = b"".join(pieces)
    assert Masker(ENVIRON).settled(whole) >= len(whole) - MAX_HELD_BYTES
    assert output(tmp_path / "out", whole) == whole.replace(SECRET.encode(), MASK.encode())


@pytest.mark.parametrize("secret", ["a pass phrase of words", TOKENS[1], "x" * 100 + SECRET])
def test_a_line_that_is_too_long_is_cut_beside_a_secret(secret: str) -> None:
    """Also beside one with spaces in it, or in a line without any."""
    masker = Masker({"A_SECRET": "a pass phrase of words", "B_SECRET": "x" * 100 + SECRET})
    for beyond in range(-len(secret) - 20, 20, 7):
        # The cut is this many bytes beyond the end of the secret.
        data = b"y" * MAX_HELD_BYTES + b"," + secret.encode() + b","
        data += b"z" * (MAX_HELD_BYTES // 2 + beyond)
        cut = masker.settled(data)
        out = masker.data(data[:cut]) + masker.data(data[cut:])
        assert cut > 0
        assert out == data.replace(secret.encode(), MASK.encode())


def test_output_of_a_rank_is_masked_head_and_tail(tmp_path: Path) -> None:
    """Not one byte of a secret reaches the file, in its head, across its cap, or in its tail."""
    texts = (f"{SECRET}\nhead\n", f"more {SECRET} of it\n" * 3, f"the end {SECRET}")
    for cap_bytes in (*range(0, 120, 7), 1 << 20):
        data = "".join(texts).encode()
        written = output(tmp_path / "out", data, cap_bytes=cap_bytes, size=30).decode()
        assert "correct-horse" not in written
        assert re.sub(r"\n\[harness: .*\]\n", "", written).endswith("the end ***")


@pytest.mark.parametrize("line", [f"{SECRET}\n", f"a {SECRET};", f"password={TOKENS[1]} "])
def test_the_end_of_a_flood_of_secrets_begins_with_no_part_of_one(
    line: str, tmp_path: Path
) -> None:
    """Masking makes such an end much shorter: what stands at its beginning must not move in."""
    for beyond in range(len(line)):
        data = line.encode() * (TAIL_BYTES * 2 // len(line)) + b"." * beyond
        _, _, tail = output(tmp_path / "out", data, cap_bytes=0).partition(b" follow]\n")
        assert len(tail) > 1000
        assert Masker(ENVIRON).data(data).endswith(tail)
