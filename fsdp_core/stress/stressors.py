"""The stressors of one rank, as a configuration names them.

jitter    streams and ranks run early and late                jitter
poison    what pools hand out and take back is NaN            pools
scramble  free memory moves between steps, and is NaN         scramble
races     on the CPU, accesses that no wait orders are found  races, clocks
"""

import contextlib
from collections.abc import Iterator, Sequence

from fsdp_core.data import mix
from fsdp_core.device import Device
from fsdp_core.fsdp.pool import Pool
from fsdp_core.stress.jitter import Jitter
from fsdp_core.stress.pools import Labels, Poison, PoolWatcher, WatchedPool
from fsdp_core.stress.races import Races
from fsdp_core.stress.scramble import Scramble


class StressorMissing(RuntimeError):
    """A stressor that this device does not have."""


class Stressors:
    """Some of the stressors, on one device.

    Args:
        names: out of `config.STRESSORS`.
        seed: of what is random in them.
        rank: of this process; each has other delays and other churn.

    Raises:
        StressorMissing: `races` on another device than the CPU.
    """

    def __init__(self, names: Sequence[str], *, device: Device, seed: int, rank: int) -> None:
        if "races" in names and device.is_cuda:
            raise StressorMissing(
                "Expected device cpu for stressor races, got cuda, whose streams cannot be "
                "watched; jitter is what finds missing waits there."
            )
        self.names, self._device = tuple(names), device
        self.jitter = Jitter(device, mix(seed, rank, 1)) if "jitter" in names else None
        self.scramble = Scramble(device, mix(seed, rank, 2)) if "scramble" in names else None
        self.races = Races() if "races" in names else None
        self.poison = Poison(device) if "poison" in names else None
        self._on = frozenset(names)
        # Labels first: what poison does to a buffer is done for its new holder.
        watchers = (None if self.races is None else Labels(self.races), self.poison, self.scramble)
        self._watchers: list[PoolWatcher] = [each for each in watchers if each is not None]

    def only(self, names: Sequence[str]) -> None:
        """From now on these alone are at work, between steps; `races` always is if it is one of us.

        What an earlier one did inside of a capture stays in the graph: capture again.

        Raises:
            ValueError: a name that is not among `names` of this object.
        """
        if unknown := sorted(set(names) - set(self.names)):
            raise ValueError(f"Expected some of {', '.join(self.names)}, got {unknown[0]}.")
        self._on = frozenset(names)
        if self.poison is not None:
            self.poison.is_on = "poison" in self._on
        if self.scramble is not None and "scramble" not in self._on:
            self.scramble.release()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Under stress inside. Streams that are made inside are to be used inside only."""
        with contextlib.ExitStack() as stack:
            if self.races is not None:
                stack.enter_context(self._device.modelling_streams(self.races.clocks))
                stack.enter_context(self._device.watching_storages(self.races))
                stack.enter_context(self.races)
            if self.jitter is not None and "jitter" in self._on:
                stack.enter_context(self.jitter)
            yield

    def watched(self, pool: Pool) -> Pool:
        """`pool`, or one around it that stressors are told of."""
        return WatchedPool(pool, self._watchers) if self._watchers else pool

    def before_step(self) -> None:
        """Do what is done once a step, on the stream that it runs on, as around other work."""
        if self.scramble is not None and "scramble" in self._on:
            self.scramble.churn()

    def after_step(self) -> None:
        """Say what was found.

        Raises:
            RaceFound: accesses that no wait orders.
        """
        if self.races is not None:
            self.races.require_none()

    def close(self) -> None:
        """Give back what is held."""
        if self.scramble is not None:
            self.scramble.release()
