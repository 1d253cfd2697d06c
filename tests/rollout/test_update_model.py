"""All orders of everything that can happen while versions are published: a search through every state of the protocol.

The controller is the real `Update`, a server's rule the real `Swap`, a worker's the real `supersedes`. The world around them is made as unkind
as it can be: every message may come late, in another order, or never; a server may refuse or break at each arrow, die, or hang for ever (it
just never moves again); every deadline may pass at every moment; the controller may see that a server died and start it again, with its first
weights, or fail to. What is checked in each state: a server's label is that of its weights, a worker never uses a server that is behind the
gate, the gate never moves without a quorum. And of the graph of all states:
whatever the servers and workers do, the controller alone, by its deadlines, gets a version through or ends the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from areal.base.errors import WeightsRefused
from areal.inference.swap import Swap
from areal.rollout.servers import supersedes
from areal.rollout.update import Action, Advance, AskAgain, End, Load, Publish, Restart, Step, Tell, Update

STAGES = 3  # load, verify, pause: what a server does before it labels, one request after the other


@dataclass(frozen=True, slots=True)
class ServerSide:
    """weights: the version that they really are. arrived: requests that wait; busy: the one that is worked on and its stage."""

    swap: Swap
    weights: int = 0
    arrived: frozenset[Load] = frozenset()
    busy: tuple[Load, int] | None = None
    dead: bool = False


@dataclass(frozen=True, slots=True)
class WorkerSide:
    serial: int
    serving: frozenset[int]


@dataclass(frozen=True, slots=True)
class World:
    """open: actions of the controller that it waits for. sent: loads on their way to a server. answers: (load, whether it is served)
    on their way back. told: (worker, Tell) on their way. faults: how many more things may go wrong on the side of the servers."""

    update: Update
    servers: tuple[ServerSide, ...]
    workers: tuple[WorkerSide, ...]
    open: frozenset[Action] = frozenset()
    sent: frozenset[Load] = frozenset()
    answers: frozenset[tuple[Load, bool]] = frozenset()
    told: frozenset[tuple[int, Tell]] = frozenset()
    faults: int = 0

    def step(self, step: Step, *, closing: Action | None = None) -> World:
        update, actions = step
        if any(isinstance(action, Advance) for action in actions):
            ready = sum(server.weights == update.target for server in self.servers)  # also one that died since
            assert ready >= update.quorum, "the gate moves without a quorum"
        held = frozenset(action for action in actions if not isinstance(action, End))
        sent = frozenset(action for action in actions if isinstance(action, Load))
        told = frozenset(
            (worker, action) for action in actions if isinstance(action, Tell) for worker in range(len(self.workers))
        )
        return replace(
            self,
            update=update,
            open=(self.open - {closing}) | held,
            sent=self.sent | sent,
            told=self.told | told,
        )

    def with_server(self, index: int, server: ServerSide, **more: object) -> World:
        servers = (*self.servers[:index], server, *self.servers[index + 1 :])
        return replace(self, servers=servers, **more)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Bounds:
    """stages: at each a server may fail; one stands for all where the search is deep. revived: servers that die are started again."""

    versions: int
    attempts: int = 2
    stages: int = STAGES
    revived: bool = True


def by_controller(world: World) -> Iterator[World]:
    """What the controller, the rank and the store do by themselves, and every deadline that may pass."""
    update = world.update
    for action in world.open:
        match action:
            case Publish():
                yield world.step(update.published(), closing=action)
                yield world.step(update.failed(), closing=action)
            case Load(index, attempt, _):
                yield world.step(update.load_failed(index, attempt), closing=action)  # out of time
            case Tell(serial, _):
                yield world.step(update.tell_failed(serial), closing=action)
            case Restart(index):
                yield world.step(update.process(index, "gone"), closing=action)
            case Advance():
                yield world.step(update.advanced(), closing=action)
                yield world.step(update.failed(), closing=action)


def by_others(world: World, bounds: Bounds) -> Iterator[World]:
    """Messages that arrive, servers that work, fail and die, pauses that end, and the next version."""
    update = world.update
    if update.phase == "idle" and update.current < bounds.versions:
        yield world.step(update.begin(update.current + 1))
    for action in world.open:
        if isinstance(action, AskAgain) and update.servers[action.server].attempt < bounds.attempts:
            yield world.step(update.due(action.server), closing=action)
        if isinstance(action, Restart):
            again = world.step(update.process(action.server, "up"), closing=action)
            yield again.with_server(
                action.server, ServerSide(Swap(0))
            )  # what was sent to the former process may come to it
        if isinstance(action, Tell) and not any(tell == action for _, tell in world.told):
            yield world.step(update.told(action.serial), closing=action)
    for load in world.sent:
        yield arrives(replace(world, sent=world.sent - {load}), load)
    for load, served in world.answers:
        left = replace(world, answers=world.answers - {(load, served)})
        heard = update.loaded(load.server, load.attempt) if served else update.load_failed(load.server, load.attempt)
        if load in world.open:
            left = left.step(heard, closing=load)
        else:  # the controller has hung up; were it to hear this all the same, nothing would change
            assert heard == (update, ()), "an answer counts that nobody waits for"
        yield left
    for worker, tell in world.told:
        known = world.workers[worker]
        if supersedes(tell.serial, known.serial):
            known = WorkerSide(tell.serial, tell.serving)
        workers = (*world.workers[:worker], known, *world.workers[worker + 1 :])
        yield replace(world, workers=workers, told=world.told - {(worker, tell)})
    for index, server in enumerate(world.servers):
        if server.dead:
            if bounds.revived and update.phase != "ended" and update.servers[index].life == "up":
                yield world.step(update.process(index, "died"))
        else:
            yield from works(world, index, server, bounds.stages)
            if world.faults:
                yield world.with_server(
                    index, ServerSide(server.swap, server.weights, dead=True), faults=world.faults - 1
                )


def arrives(world: World, load: Load) -> World:
    server = world.servers[load.server]
    if server.dead:
        return world
    try:
        server = replace(server, swap=server.swap.asked(load.label), arrived=server.arrived | {load})
        return world.with_server(load.server, server)
    except WeightsRefused:
        return replace(world, answers=world.answers | {(load, False)})


def works(world: World, index: int, server: ServerSide, stages: int) -> Iterator[World]:
    if server.busy is None:
        for load in server.arrived:
            yield world.with_server(index, replace(server, busy=(load, 0), arrived=server.arrived - {load}))
        return
    load, stage = server.busy
    free = replace(server, busy=None)
    refused = world.answers | {(load, False)}
    if world.faults:
        yield world.with_server(index, free, answers=refused, faults=world.faults - 1)
    if stage + 1 < stages:
        yield world.with_server(index, replace(server, busy=(load, stage + 1)))
        return
    try:
        swap = server.swap.labelled(load.label)
    except WeightsRefused:
        yield world.with_server(index, free, answers=refused)
        return
    served = replace(free, swap=swap, weights=load.label)
    yield world.with_server(index, served, answers=world.answers | {(load, True)})


def check(world: World) -> None:
    update = world.update
    for server in world.servers:
        assert server.swap.label == server.weights, "a label names other weights"
    for worker in world.workers:
        for index in worker.serving:
            assert world.servers[index].weights >= update.current, "traffic goes to a server that is behind the gate"
            assert world.servers[index].weights <= update.newest
    for index, known in enumerate(update.servers):
        if known.serving and not world.servers[index].dead:
            assert world.servers[index].weights >= update.current
    if update.phase == "idle":
        assert sum(known.counts for known in update.servers) >= update.quorum, (
            "nobody serves and the run waits for nobody"
        )


def explore(world: World, bounds: Bounds) -> tuple[dict[World, list[World]], int]:
    """Every state that can be reached, with what can follow by the controller alone."""
    seen: dict[World, list[World]] = {}
    todo = deque([world])
    edges = 0
    while todo:
        now = todo.popleft()
        if now in seen:
            continue
        check(now)
        own = list(by_controller(now))
        seen[now] = own
        for after in (*own, *by_others(now, bounds)):
            edges += 1
            if after not in seen:
                todo.append(after)
    return seen, edges


def through(world: World, seen: dict[World, list[World]]) -> bool:
    """Whether the controller alone comes to an end from here, whichever deadline passes first. Its moves make no circle: each
    closes an action, and opens none of an earlier phase."""
    todo, known = [world], {world}
    while todo:
        now = todo.pop()
        if now.update.phase in ("idle", "ended"):
            continue
        if not seen[now]:
            return False  # it waits for somebody who need not answer
        for after in seen[now]:
            if after not in known:
                known.add(after)
                todo.append(after)
    return True


def start(*, servers: int, workers: int, quorum: int, faults: int) -> World:
    update = Update.of(servers=servers, quorum=quorum, current=0)
    everyone = WorkerSide(0, frozenset(range(servers)))
    return World(update, (ServerSide(Swap(0)),) * servers, (everyone,) * workers, faults=faults)


CASES = [
    pytest.param((2, 1, 1, 0), Bounds(versions=1), id="2 servers, one is enough"),
    pytest.param((2, 1, 2, 0), Bounds(versions=2), id="2 servers, both are needed, 2 versions"),
    pytest.param((2, 1, 1, 1), Bounds(versions=1, stages=1, revived=False), id="2 servers, one may break"),
    pytest.param((2, 1, 1, 1), Bounds(versions=1, stages=1, attempts=1), id="2 servers, one may die"),
    pytest.param((1, 1, 1, 1), Bounds(versions=2), id="1 server, which may break"),
    pytest.param((1, 1, 1, 2), Bounds(versions=1, stages=1), id="1 server, which may break twice"),
    pytest.param((2, 1, 1, 0), Bounds(versions=2, stages=1), marks=pytest.mark.heavy, id="2 servers, 2 versions"),
]


@pytest.mark.parametrize(("world", "bounds"), CASES)
def test_T065_whatever_happens_when_no_label_lies_no_gate_runs_ahead_and_nobody_waits_for_ever(
    world: tuple[int, int, int, int], bounds: Bounds
) -> None:
    servers, workers, quorum, faults = world
    revived = bool(faults) and bounds.revived
    seen, edges = explore(start(servers=servers, workers=workers, quorum=quorum, faults=faults), bounds)
    print(f"{len(seen)} states, {edges} transitions")
    assert all(through(state, seen) for state in seen)
    assert any(state.update.current == bounds.versions for state in seen)
    assert any(state.update.phase == "ended" for state in seen)
    idle = [state.update for state in seen if state.update.phase == "idle" and state.update.current]
    assert any(len(update.serving) < servers for update in idle) == (quorum < servers or revived)
    assert quorum == servers or any(a_server_came_back(state) for state in seen)
    lives = {known.life for update in idle for known in update.servers}
    gone = {"gone"} if quorum < servers else set()
    assert lives == ({"up", "died", "starting"} | gone if revived else {"up"})


def test_the_only_server_comes_back_while_what_it_was_to_load_is_replaced_and_gets_the_next_version() -> None:
    state, tell = Update.of(servers=1, quorum=1, current=3).process(0, "died")
    assert tell == (Tell(1, frozenset()),)
    state, actions = state.told(1)
    assert actions == (Restart(0),)
    state, actions = state.process(0, "up")
    assert actions == (Load(0, 1, 3),)
    state, _ = state.begin(4)
    state, actions = state.load_failed(0, 1)  # version 3 has just been retired
    assert actions == (AskAgain(0),)
    state, actions = state.published()
    assert actions == (Load(0, 2, 4),)
    state, actions = state.loaded(0, 2)
    assert actions == (Tell(2, frozenset({0})),)


def test_a_server_that_answers_late_with_the_version_before_is_asked_for_the_one_that_needs_it() -> None:
    state, _ = Update.of(servers=2, quorum=1, current=0).begin(1)
    state, _ = state.published()
    state, again = state.load_failed(0, 1)
    state, _ = state.loaded(1, 1)
    state, _ = state.told(1)
    state, _ = state.advanced()
    state, actions = state.due(again[0].server)
    assert actions == (Load(0, 2, 1),)
    state, _ = state.begin(2)
    state, actions = state.published()
    assert actions == (Load(1, 2, 2),)
    state, actions = state.loaded(0, 2)
    assert actions == (Load(0, 3, 2),)
    state, _ = state.load_failed(1, 2)
    assert state.phase == "load"
    state, actions = state.loaded(0, 3)
    assert actions == (Tell(2, frozenset({0})),)


def a_server_came_back(world: World) -> bool:
    """After the version it missed, which the others have."""
    update = world.update
    return (
        update.current > 0
        and update.phase == "idle"
        and len(update.serving) == len(world.servers)
        and update.serial >= 2
    )
