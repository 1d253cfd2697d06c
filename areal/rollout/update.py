"""The update of the served weights as a pure state machine: what the controller knows, and what each event makes it do next.

    state = Update.of(servers=2, quorum=1, current=3)
    state, actions = state.begin(4)                       # (Publish(4),)
    state, actions = state.published()                    # (Load(0, attempt=1, label=4), Load(1, 1, 4))
    state, actions = state.loaded(0, attempt=1)           # () it waits for the other, which answers, refuses or runs out of time
    state, actions = state.load_failed(1, attempt=1)      # (Tell(1, {0}), AskAgain(1))
    state, actions = state.told(1)                        # (Advance(4),)
    state, actions = state.advanced()                     # ()

    idle --begin--> publish --> load --> tell --> advance --> idle          each arrow may fail, by a reason or by its deadline: -> ended,
                                                                            but a server that fails to load only goes out

A server that is *out* gets no traffic. It is asked again in the background; once it has answered it is *keen*: used at once if it has the
current version and nothing is on its way, otherwise the next version waits for it as for all others. An answer counts only for
the newest load of its server, and a worker keeps the newest of the sets it was told, so whatever comes late changes nothing.

A server whose process dies is out at once. It has its first weights again when it is back, so it is started only after every worker has heard
that it is out, and is then asked like one that has answered. A version waits for it only where the quorum needs it.
No clock, no I/O: weights.py does what the actions say and reports what came of it; tests/rollout/test_update_model.py tries all orders.
What a server does with a load: inference/swap.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Phase = Literal["idle", "publish", "load", "tell", "advance", "ended"]
Life = Literal["up", "died", "starting", "gone"]


@dataclass(frozen=True, slots=True)
class Publish:
    """The rank hands the weights to the transfer under this label."""

    label: int


@dataclass(frozen=True, slots=True)
class Load:
    """Ask a server to load this version; report `loaded` or `load_failed`, in bounded time."""

    server: int
    attempt: int
    label: int


@dataclass(frozen=True, slots=True)
class AskAgain:
    """After a pause, report `due`."""

    server: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the process of a server again; report that it is `up`, or `gone`, in bounded time."""

    server: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Every worker uses these servers alone; report `told` or `tell_failed`, in bounded time."""

    serial: int
    serving: frozenset[int]


@dataclass(frozen=True, slots=True)
class Advance:
    """The gate moves on to this version; report `advanced` or `failed`."""

    label: int


@dataclass(frozen=True, slots=True)
class End:
    """The run ends: this arrow failed."""

    arrow: Phase


Action = Publish | Load | AskAgain | Restart | Tell | Advance | End


@dataclass(frozen=True, slots=True)
class Server:
    """serving: workers may use it. keen: out, but it has answered since. attempt: number of its newest load; asked: the label of
    that load while it is unanswered. loaded: it has the version on its way. life: of its process; one that died is started again, one
    that is gone is not."""

    serving: bool = True
    keen: bool = False
    attempt: int = 0
    asked: int | None = None
    loaded: bool = False
    life: Life = "up"

    @property
    def awaited(self) -> bool:
        """The version on its way waits for it."""
        return self.serving or self.keen

    @property
    def counts(self) -> bool:
        """It serves, or may do so before it is asked again in the background."""
        return self.awaited or self.life in ("died", "starting")


@dataclass(frozen=True, slots=True)
class Update:
    """current: what the gate stands at. target: what is on its way. newest: the last version that was published, which can be loaded.
    sent: the set of the newest Tell, None where it is not known to have arrived."""

    quorum: int
    servers: tuple[Server, ...]
    current: int
    newest: int
    sent: frozenset[int] | None
    serial: int = 0
    phase: Phase = "idle"
    target: int | None = None

    @classmethod
    def of(cls, *, servers: int, quorum: int, current: int) -> Update:
        """All serve `current`, and the workers use all."""
        return cls(quorum, (Server(),) * servers, current, current, frozenset(range(servers)))

    @property
    def serving(self) -> frozenset[int]:
        return frozenset(index for index, server in enumerate(self.servers) if server.serving)

    def begin(self, label: int) -> Step:
        """A new version is to be published. Only while idle."""
        if self.phase != "idle":
            raise ValueError(f"version {label} cannot begin: {self.target} is at {self.phase!r}")
        servers = tuple(replace(server, loaded=False) for server in self.servers)
        return replace(self, phase="publish", target=label, servers=servers), (Publish(label),)

    def published(self) -> Step:
        """The version can be loaded: all that serve, and the keen ones, are asked for it, and waited for."""
        if self.phase == "ended":
            return self, ()
        assert self.target is not None
        state: Update = replace(self, phase="load", newest=self.target)
        actions: tuple[Action, ...] = ()
        for index, server in enumerate(state.servers):
            if server.awaited:
                state, more = state._ask(index)
                actions += more
        return state._settled(actions)

    def loaded(self, index: int, attempt: int) -> Step:
        """A server has answered that it serves what it was asked for."""
        server = self.servers[index]
        if server.asked is None or server.attempt != attempt:
            return self, ()  # of a load that was given up
        label = server.asked
        state = self._with(index, asked=None, keen=not server.serving, loaded=label == self.target)
        if state.phase == "load":
            # A keen one that was asked before this version was published has the one before: the quorum may need it.
            return state._settled(()) if label == self.target else state._ask(index)
        if server.serving or state.phase != "idle":
            return state, ()  # keen: asked again when the version on its way has arrived, or with the next
        if label == state.current:
            return state._with(index, serving=True, keen=False)._tell(())
        return state._ask(index)

    def load_failed(self, index: int, attempt: int) -> Step:
        """A server has refused, broken off or run out of time: it keeps what it has, and is out."""
        server = self.servers[index]
        if server.asked is None or server.attempt != attempt:
            return self, ()
        keen = server.keen and self.phase == "publish"  # what it was asked for is being replaced: it gets the next one
        state = self._with(index, asked=None, keen=keen, serving=False, loaded=False)
        return state._settled((AskAgain(index),))

    def process(self, index: int, life: Literal["died", "up", "gone"]) -> Step:
        """The process of a server has ended: it is out, and may be started again as soon as no worker uses it. Or it is up again, with
        the weights that it was first started with. Or it cannot be started again, and is asked no more."""
        if self.phase == "ended" or life == self.servers[index].life:
            return self, ()
        if life == "up":
            back = self._with(index, life=life, keen=True)
            return back._ask(index) if self.phase in ("idle", "load") else (back, ())
        state = self._with(index, asked=None, keen=False, serving=False, loaded=False, life=life)
        if life == "gone":
            return state._settled(())
        state, actions = state._tell(())
        return replace(state, sent=None)._settled(actions)

    def due(self, index: int) -> Step:
        """The pause of a server that is out is over."""
        server = self.servers[index]
        if self.phase == "ended" or server.awaited or server.asked is not None or server.life != "up":
            return self, ()
        if self.phase == "publish":
            return self, (AskAgain(index),)  # the published copy is being replaced
        return self._ask(index)

    def told(self, serial: int) -> Step:
        """Every worker has heard a Tell."""
        if serial != self.serial or self.phase == "ended":
            return self, ()
        state, actions = self, tuple[Action, ...]()
        for index, server in enumerate(self.servers):
            if server.life == "died":
                state, actions = state._with(index, life="starting"), (*actions, Restart(index))
        if self.phase != "tell":
            return state, actions
        assert self.target is not None
        return replace(state, phase="advance"), (*actions, Advance(self.target))

    def tell_failed(self, serial: int) -> Step:
        """A worker could not be told: the version must not move on, and a server that died stay dead; one that returns is told of again
        with the next version."""
        if serial != self.serial or self.phase == "ended":
            return self, ()
        if self.phase == "tell" or any(server.life == "died" for server in self.servers):
            return replace(self, phase="ended"), (End("tell"),)
        return replace(self, sent=None), ()

    def advanced(self) -> Step:
        """The gate has moved on."""
        if self.phase == "ended":
            return self, ()
        assert self.target is not None
        state: Update = replace(self, phase="idle", current=self.target, target=None)
        actions: tuple[Action, ...] = ()
        for index, server in enumerate(state.servers):
            if server.keen and server.asked is None:
                state, more = state._ask(index)
                actions += more
        return state, actions

    def failed(self) -> Step:
        """The arrow of this phase failed: the run ends, the gate stays."""
        return replace(self, phase="ended"), (End(self.phase),)

    def _with(self, index: int, **changes: object) -> Update:
        server = replace(self.servers[index], **changes)  # type: ignore[arg-type]
        return replace(self, servers=(*self.servers[:index], server, *self.servers[index + 1 :]))

    def _ask(self, index: int) -> Step:
        attempt = self.servers[index].attempt + 1
        return self._with(index, attempt=attempt, asked=self.newest), (Load(index, attempt, self.newest),)

    def _settled(self, actions: tuple[Action, ...]) -> Step:
        """The run ends where the quorum can no longer be had. While loading, go on once every awaited server has answered; those that
        are being started again are waited for where the quorum needs them."""
        if self.phase != "ended" and sum(server.counts for server in self.servers) < self.quorum:
            return replace(self, phase="ended"), (*actions, End("load"))
        if self.phase != "load" or any(server.awaited and server.asked is not None for server in self.servers):
            return self, actions
        servers = tuple(replace(one, serving=one.loaded, keen=one.keen and not one.loaded) for one in self.servers)
        state: Update = replace(self, servers=servers)
        if len(state.serving) < state.quorum:
            return self, actions
        if state.serving != state.sent:
            return replace(state, phase="tell")._tell(actions)
        assert state.target is not None
        return replace(state, phase="advance"), (*actions, Advance(state.target))

    def _tell(self, actions: tuple[Action, ...]) -> Step:
        serial = self.serial + 1
        return replace(self, serial=serial, sent=self.serving), (*actions, Tell(serial, self.serving))


Step = tuple[Update, tuple[Action, ...]]
