"""Bursts of requests of one kind, with the store checked after each.

bursts = Bursts(target, examples=100)
for kind in bursts.kinds: bursts.run(kind, seed=7)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.attacks import ATTACKS
from tests.fuzz.described import as_described, operations
from tests.fuzz.target import Target


class Bursts:
    """kinds: the attacks, and `METHOD path` of every operation of the description."""

    def __init__(self, target: Target, *, examples: int) -> None:
        self._target, self._examples = target, examples
        self._operations = {f"{one.method.upper()} {one.path}": one for one in operations()}
        self.kinds = [*ATTACKS, *self._operations]

    def forever(self) -> Iterator[str]:
        """Every attack after every operation, so that half of all bursts are attacks."""
        attacks = cycle(ATTACKS)
        for operation in cycle(self._operations):
            yield next(attacks)
            yield operation

    def run(self, kind: str, seed_of_burst: int) -> None:
        """Raises the failure of the smallest request that shows it."""
        if kind in self._operations:
            as_described(self._target, self._operations[kind], examples=self._examples // 4, random_seed=seed_of_burst)
        else:
            self._attack(kind, seed_of_burst)
        self._target.check()

    def _attack(self, kind: str, seed_of_burst: int) -> None:
        @seed(seed_of_burst)
        @settings(
            max_examples=self._examples,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def one(data: st.DataObject) -> None:
            ATTACKS[kind](self._target, data)

        one()
