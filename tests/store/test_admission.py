"""The capacity law against its formula as written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.base.errors import ConfigError
from areal.base.types import Limits
from areal.store.admission import check_limits, free_groups, survivors_needed, tightest

small = st.integers(0, 50)
LIMITS = st.builds(
    Limits,
    max_concurrent=st.integers(1, 50),
    max_lag=st.integers(0, 5),
    batch_groups=st.integers(1, 20),
    queue_size=small,
)


def naive(limits: Limits, running: int, accepted: int) -> int:
    free = min(
        limits.max_concurrent - running,
        (limits.max_lag + 1) * limits.batch_groups - (running + accepted),
        limits.queue_size - (running + accepted) if limits.queue_size > 0 else 10**9,
    )
    return free if free > 0 else 0


@given(LIMITS, small, small)
def test_the_law_is_its_formula(limits: Limits, running: int, accepted: int) -> None:
    assert free_groups(limits, running, accepted) == naive(limits, running, accepted)


@given(LIMITS, st.lists(st.sampled_from(["begin", "accept", "consume"]), max_size=100))
def test_whoever_asks_first_never_outruns_the_lag(limits: Limits, moves: list[str]) -> None:
    running = accepted = 0
    for move in moves:
        if move == "begin" and free_groups(limits, running, accepted):
            running += 1
        elif move == "accept" and running:
            running, accepted = running - 1, accepted + 1
        elif move == "consume" and accepted:
            accepted -= 1
        assert running <= limits.max_concurrent
        assert running + accepted <= (limits.max_lag + 1) * limits.batch_groups
        assert not limits.queue_size or accepted <= limits.queue_size


def test_T059_no_version_stands_in_the_law() -> None:
    assert free_groups(Limits(max_concurrent=1000, max_lag=2, batch_groups=8), running=0, accepted=0) == 24


def test_more_waiting_than_the_lag_allows_is_no_room_not_negative_room() -> None:
    """A recovery may hand back groups of several steps at once."""
    assert free_groups(Limits(max_concurrent=8, max_lag=0, batch_groups=4), running=0, accepted=12) == 0


@pytest.mark.parametrize(
    ("running", "accepted", "key"),
    [(4, 0, "max_concurrent_rollouts"), (0, 6, "max_head_offpolicyness"), (0, 5, "queue_size")],
)
def test_the_tightest_bound_names_its_key(running: int, accepted: int, key: str) -> None:
    limits = Limits(max_concurrent=4, max_lag=2, batch_groups=2, queue_size=5 if key == "queue_size" else 0)
    bound = tightest(limits, running, accepted)
    assert bound.key == f"rollout.{key}"
    assert bound.free == 0


def test_a_lone_session_trains_only_where_it_is_the_group() -> None:
    assert [survivors_needed(n) for n in (1, 2, 8)] == [1, 2, 2]


def test_impossible_limits_name_the_key_the_value_and_the_least() -> None:
    with pytest.raises(ConfigError, match=r"gconfig.n_samples is 0; it must be at least 1"):
        check_limits(Limits(max_concurrent=1, max_lag=0, batch_groups=1, n_samples=0))
    with pytest.raises(ConfigError, match=r"group_timeout_seconds is nan"):
        check_limits(Limits(max_concurrent=1, max_lag=0, batch_groups=1, group_timeout_s=float("nan")))
