"""Ranks that print without end, or that tell secrets, as `base.seed` says."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import quote

from harness.records import RunSpec
from tests.kill_and_resume import ranks

FLOOD_SEED, SECRET_SEED, FAIL_SEED = 101, 102, 103
FLOOD_BYTES = 1 << 30
SECRETS = {
    "DEPLOY_TOKEN": "swordfish-0123456789",
    "DB_PASSWORD": "open-sesame-98765",
    "NCCL_SECRET_KEY": "nccl-hidden-5555",
    "LOGIN_PASS": "hunter2",
    "VAULT_PASSPHRASE": "four plain words and 1 more",
    "RELEASE_SIGNING_KEY": "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIIb0\nqv9aLkT2fXo\n-----END--",
}
DATABASE_URL = "postgres://me:w0rd%40of-it@db/x"
FOUND = {
    "database": "w0rd%40of-it", "github": "ghp_" + "a1B2" * 9, "remote": "r3mote-pw",
    "pem": "MIIEpAIBAAKCAQEA7", "session": "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "key, part": "qv9aLkT2fXo", "phrase, part": "four plain",
}  # fmt: skip
"""Secrets that no variable of a telling name holds whole, by where they come from."""


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """A stub rank that misbehaves first."""
    seed = spec.config["seed"]
    if seed == FLOOD_SEED and rank == 0:
        block = (b"x" * 99 + b"\n") * 10_000
        for _ in range(FLOOD_BYTES // len(block)):
            os.write(2, block)
        os.write(2, b"the last words\n")
    if seed in (SECRET_SEED, FAIL_SEED):
        _tell()
    if seed == FAIL_SEED and spec.config["graph"] == ["attn"]:
        raise RuntimeError(f"login as {os.environ['LOGIN_PASS']}, {os.environ['DB_PASSWORD']}")
    quiet = dataclasses.replace(spec, config=spec.config | {"seed": 0})
    assert quiet.world_size == spec.world_size
    return ranks.rank_main(spec, folder, rank, store_port)


def _tell() -> None:
    """Print every secret, in pieces, in other forms, and where long lines are cut."""
    for name in SECRETS:
        value = os.environ[name]
        sys.stderr.write(f"connecting with {value} as {name}={value}\n")
        os.write(2, f"in pieces {value[:7]}".encode())
        os.write(2, f"{value[7:]}\n".encode())
        os.write(1, f"{value!r} {quote(value)} {json.dumps({'value': value})}\n".encode())
        for before in (40_000, 65_530, 100_000):
            os.write(1, b"x" * before + b" " + value.encode() + b" " + b"y" * 70_000)
        os.write(1, b"\n")
    os.write(2, b"https://user:" + os.environ["DB_PASSWORD"].encode() + b"@host/\n")
    os.write(2, f"origin\thttps://bot:{FOUND['remote']}@git.host/x.git (fetch)\n".encode())
    os.write(2, f"{DATABASE_URL}; {FOUND['github']}, {FOUND['session']}\n".encode())
    for line in ("-----BEGIN RSA PRIVATE KEY-----", *[FOUND["pem"]] * 9, "-----END RSA-----"):
        os.write(2, f"{line}\n".encode())
        time.sleep(0.001)
