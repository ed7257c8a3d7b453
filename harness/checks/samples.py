"""Do data-parallel ranks of a run read different samples? Of the built-in trainer's runs.

Reference and candidate share the sampler, so that no comparison of both sees one that gives every
rank the same. Ranks that differ in dp_outer, dp or cp have tokens of their own; those of tp, pp, ep
and etp with the same three read the same. What is compared is all that a rank reads in the run, as
a single batch may be drawn twice by chance: nothing is said where all of them may (`_may_repeat`).

Of another program nobody knows which ranks share their data, so that nothing is asked of it.
"""

import math

from fsdp_core.config import TrainConfig
from fsdp_core.layouts import Dense, dense_coordinates
from harness.checks.answer import error, failed
from harness.checks.evidence import count, rank_table
from harness.records import DIGEST_HEX_CHARS, SAMPLES, CheckResult, Difference, RunResult

NAME = "samples"
TOKENS = "tokens"
LEAST_BITS = 32.0
"""Of chance in all that a rank reads."""
LEAST_STEPS = 6
"""Of a user's corpus, which may be as short as a sequence: this many steps, no two alike."""


def same_data(run: RunResult, leg: str) -> CheckResult | None:
    """A failure that names the first rank that reads what a rank of another part reads, if any.

    Args:
        run: whole, see `complete.find_flaw`.
        leg: name of it for people.
    """
    if not run.spec.is_builtin or run.spec.world_size == 1:
        return None
    # The first tensor of the group: the second, its targets, are the tokens after them.
    tokens_of = {
        rank: tuple(step.digests.get(SAMPLES, "")[:DIGEST_HEX_CHARS] for step in records.steps)
        for rank, records in rank_table(run).items()
    }
    if not all(map(all, tokens_of.values())):
        return None  # records that are older than the group
    try:
        config = TrainConfig.from_dict(run.spec.config)
        places = {rank: dense_coordinates(config.parallel, rank) for rank in tokens_of}
    except (ValueError, TypeError) as wrong:
        return error(NAME, "corrupt_record", f"the {leg}'s specification, config: {wrong}")
    read: dict[tuple[str, ...], int] = {}
    for rank, tokens in tokens_of.items():
        if _may_repeat(config, tokens):
            return None
        first = read.setdefault(tokens, rank)
        if _part(places[first]) == _part(places[rank]):
            continue
        return failed(
            NAME,
            "same_data",
            f"in the {leg} rank {rank} reads the tokens of rank {first} in every step "
            f"({count(len(tokens), 'step')}), though their data-parallel or context-parallel ranks "
            "differ",
            Difference(
                step=0, rank=rank, quantity=SAMPLES, tensor=TOKENS,
                reference=tokens[0], candidate=tokens[0],
            ),
            same_as_rank=first,
        )  # fmt: skip
    return None


def _may_repeat(config: TrainConfig, tokens: tuple[str, ...]) -> bool:
    """Whether another rank might read the same by chance."""
    if config.data.path is not None:
        return len(tokens) < LEAST_STEPS or len(set(tokens)) < len(tokens)
    sequences = len(tokens) * config.microbatches * config.micro_batch_size
    return sequences * math.log2(config.model.vocab_size) < LEAST_BITS


def _part(place: Dense) -> tuple[int, int, int]:
    """Ranks that agree in it read the same tokens."""
    return place.dp_outer, place.dp, place.cp
