"""Ranks without torch, for runs that are killed, flooded and searched: `base.seed` says what else.

Each takes a moment for a step, so that a kill finds it at work.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from fsdp_core.config import TrainConfig
from harness.checks.complete import launches, owed
from harness.recorder import RecordFile
from harness.records import RunSpec
from harness.store.contents import write_contents
from tests.planted.stub_ranks import initial_record, start_record, step_record
from tests.support import records

STEP_S = 0.02
STARTS_FILE = "starts.log"
"""In the run folder: a line for each start of a run, by its rank 0."""
FLOOD_SEED, SECRET_SEED, FAIL_SEED, POOL_SEED = 101, 102, 103, 104
"""Prints without end; tells secrets; does, and raises; is wrong in any pool but the double one."""
FLOOD_BYTES = 1 << 30
LAST_WORDS = b"the last words\n"
SECRETS = {
    "DEPLOY_TOKEN": "swordfish-0123456789", "DB_PASSWORD": "open-sesame-98765",
    "NCCL_SECRET_KEY": "nccl-hidden-5555", "LOGIN_PASS": "hunter2",
    "VAULT_PASSPHRASE": "four plain words and 1 more",
    "RELEASE_SIGNING_KEY": "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIIb0\nqv9aLkT2fXo\n-----END--",
}  # fmt: skip
DATABASE_URL = "postgres://me:w0rd%40of-it@db/x"
FOUND = {
    "database": "w0rd%40of-it", "github": "ghp_" + "a1B2" * 9, "remote": "r3mote-pw",
    "pem": "MIIEpAIBAAKCAQEA7", "session": "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    "key, part": "qv9aLkT2fXo", "phrase, part": "four plain",
}  # fmt: skip
"""Secrets that no variable of a telling name holds whole, by where they come from."""


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """Write the records of a run."""
    config, seed = spec.config, spec.config["seed"]
    if not rank:
        # In one write, as others may start too.
        log = os.open(folder.parents[1] / STARTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(log, f"{spec.key}\n".encode())
        os.close(log)
    _misbehave(spec, rank)
    file = RecordFile(folder / f"rank{rank}.jsonl")
    file.write(replace(start_record(spec, rank), run=spec.key))
    file.write(initial_record(rank))
    is_last = rank == spec.world_size - 1
    is_wrong = seed == POOL_SEED and config["fsdp"]["pool"] != "double" and is_last
    for step in range(config["steps"]):
        time.sleep(0 if seed == POOL_SEED else STEP_S)
        record = step_record(step, rank)
        if is_wrong and step >= 2:
            record = replace(record, digests=record.digests | {"weights": "1" * 32})
        file.write(record)
    if spec.keep is not None:
        about = records.kept_tensor(spec.keep.names[0], (1,))
        write_contents(folder, spec.key, rank, spec.keep.step, [(about, bytes([is_wrong] * 4))])
    graphs = tuple(owed(TrainConfig.from_dict(config), rank, config["steps"]))
    file.write(records.end(rank, steps=config["steps"], replays=launches(graphs), graphs=graphs))
    return 0


def _misbehave(spec: RunSpec, rank: int) -> None:
    seed = spec.config["seed"]
    if seed == FLOOD_SEED and rank == 0:
        block = (b"x" * 99 + b"\n") * 10_000
        for _ in range(FLOOD_BYTES // len(block)):
            os.write(2, block)
        os.write(2, LAST_WORDS)
    if seed in (SECRET_SEED, FAIL_SEED):
        _tell()
    if seed == FAIL_SEED and spec.config["graph"] == ["attn"]:
        raise RuntimeError(f"login as {os.environ['LOGIN_PASS']}, {os.environ['DB_PASSWORD']}")


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
