"""Kill after kill while agents work, and the judgement after each: `python -m tests.faults` and test_kills.py run this.

    report = Campaign(folder, seed=7, kills=200).run()
    report.violations                                       # sentences; empty is the only good result

A life of the run ends by a kill of any of its processes, at a moment that the seed chooses, sometimes of two at once, sometimes while it
still starts; then the same command starts it again, or it begins again by itself. A standing gateway is started again in place, and the run itself starts its inference
server again. The clients go on by themselves.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from tokenizers import Tokenizer

from areal.tools.status import look
from tests.faults import judge
from tests.faults.evidence import NOTHING, Checkpoint, Held, checkpoints, read_held, trained
from tests.faults.journal import Seen, read
from tests.faults.moments import MOMENTS, STARTING, Kill, Watch, plan
from tests.faults.service import ADMIN
from tests.faults.target import AGAIN, BACK, GROUPS, LAG, READY, ROOT, SOON_S, Target, kill_at_once, wait_for

Say = Callable[[str], None]
STARTING_S = 9.0  # a kill during the start comes within so long


@dataclass(slots=True)
class Report:
    """What was done, and what was found. kinds, moments: kills by either; two at once are two kills. by_itself: of the lives, those that began
    without a command."""

    kinds: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    by_itself: int = 0
    violations: list[str] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)

    @property
    def kills(self) -> int:
        return self.kinds.total()

    def text(self) -> str:
        """In a few lines."""
        lines = [
            f"{self.kills} kills in {self.lives} lives of the run, of which {self.by_itself} began by themselves: {_listed(self.kinds)}",
            f"moments: {_listed(self.moments)}",
            ", ".join(f"{number} {what}" for what, number in self.done.items()),
            f"{len(self.violations)} violations" if self.violations else "nothing lost, nothing doubled",
        ]
        return "\n".join(lines)


class Campaign:
    """One folder, one seed."""

    def __init__(self, folder: Path, seed: int, kills: int, say: Say = print) -> None:
        self.folder, self.seed, self.say = folder, seed, say
        self.plan = deque(plan(seed, kills))
        self.random = random.Random(f"{seed}, beside the plan")
        self.report = Report()
        self.journals = folder / "journals"
        self.journals.mkdir()
        self.target = Target(folder)
        self.watch = Watch(self.target.run, self.journals, self.random)
        self.before: Held = NOTHING  # the store when it was last looked at, and the newest checkpoint then
        self.saved = 0
        self.lives: dict[str, float] = {}  # incarnation -> when its command was given
        self.started_at = 0.0

    def run(self) -> Report:
        """All kills of the plan, then the end; the report. Raises TimeoutError where something hangs."""
        with self.target:
            self._up()
            clients = [self._client(name) for name in ("a", "b")]
            try:
                while self.plan:
                    self._kill(self.plan.popleft())
                self._end(clients)
            finally:
                for client in clients:
                    client.kill()
                    client.wait()
        return self.report

    def _client(self, name: str) -> subprocess.Popen[bytes]:
        words = ["--url", self.target.url, "--admin", ADMIN, "--seed", str(self.seed)]
        places = ["--journal", str(self.journals / f"{name}.jsonl"), "--stop", str(self.folder / "stop")]
        with (self.folder / f"client-{name}.out").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.faults.client", *words, *places], cwd=ROOT, stdout=output, stderr=output
            )

    def _up(self) -> None:
        """Start the run, with the kills that come on the way, until clients reach it."""
        self._start()
        while self.plan and self.plan[0].moment == STARTING:
            self._kill_starting(self.plan.popleft())
        before, saved = self.before, self.saved
        if not self.target.until_ready():
            raise TimeoutError(f"the run does not start: {self.target.until_ended()[1][-2000:]}")
        held = read_held(self.target.run)
        self._note_life(held)
        self._found(judge.resumed(before, held, saved, checkpoints(self.target.run)), f"life {self.report.lives}")

    def _start(self) -> None:
        if self.random.random() < 0.4:
            self.target.stand(self.target.gateway is None)
        self.target.retries = 0 if self.target.retries else 3  # every second command
        self.started_at = time.time()
        self.target.start()
        self.report.lives += 1

    def _note_life(self, held: Held) -> None:
        if held.versions:
            self.lives.setdefault(held.versions[-1].incarnation, self.started_at)

    def _kill_starting(self, kill: Kill) -> None:
        time.sleep(self.random.uniform(0, STARTING_S))
        victim, pid = next(((one, pid) for one in kill.victims if (pid := self.target.pid(one)) is not None), ("", 0))
        if not victim:
            return  # it has ended by itself: until_ready says so
        back = self.target.logged(BACK)
        kill_at_once([pid])
        where = self._count([victim], STARTING)
        if victim == "gateway" and self.target.gateway is not None:
            self.target.restart_gateway()
        elif victim != "server" or not self.target.until_server_back(back):  # else the run was up already
            self._dead([victim], where)
            self._start()

    def _kill(self, kill: Kill) -> None:
        """Of a run that is up; it is up again when this returns."""
        moment = "soon" if kill.moment == STARTING else kill.moment
        victims, pids = list(kill.victims), [pid for pid in map(self.target.pid, kill.victims) if pid is not None]
        for _ in range(kill.after_steps):
            MOMENTS["consumed"](self.watch)
        came = MOMENTS[moment](self.watch)
        if self.target.ended:
            self._found([f"the run ended by itself: {self.target.until_ended()[1][-2000:]}"], "between two kills")
            return self._up()
        back, ups, again = (self.target.logged(what) for what in (BACK, READY, AGAIN))
        kill_at_once(pids)
        where = self._count(victims, moment if came else "soon")
        if "gateway" in victims and self.target.gateway is not None:
            self.target.restart_gateway()
        if any(self.target.ends_without(victim) for victim in victims):
            if self.target.retries and "controller" not in victims and self._begins_again(where, ups, again):
                return None
            self._dead(victims, where)
            return self._up()
        if "server" in victims and not self.target.until_server_back(back):
            self._found([f"the run ended with its inference server: {self.target.until_ended()[1][-2000:]}"], where)
            return self._up()
        self._look(where)

    def _begins_again(self, where: str, ups: int, again: int) -> bool:
        """By itself; False where it ended, because it had not been wholly up. ups, again: how often it has been reached, and begun again, since
        its command."""
        before, saved, complete = self.before, self.saved, set(checkpoints(self.target.run))
        if not self.target.until_begun_again(again):
            return False
        self.started_at = time.time()
        if not self.target.until_ready(ups):
            return False
        held = read_held(self.target.run)
        self.report.lives += 1
        self.report.by_itself += 1
        self._note_life(held)
        self._found(judge.resumed(before, held, saved, complete | set(checkpoints(self.target.run))), where)
        self._look(where)
        return True

    def _count(self, victims: list[str], moment: str) -> str:
        self.report.kinds.update(victims)
        self.report.moments[moment] += len(victims)
        return f"kill {self.report.kills} ({' and '.join(victims)}, {moment})"

    def _dead(self, victims: list[str], where: str) -> None:
        """A process was killed that the run cannot do without: it ends by itself, and says why in a sentence."""
        code, said = self.target.until_ended()
        found = []
        if code != (-9 if "controller" in victims else 1):
            found.append(f"the run ended with code {code}: {said[-500:]}")
        if "Traceback" in said:
            found.append(f"the run ended with a traceback: {said[-3000:]}")
        self._found(found, where)
        self._look(where)

    def _look(self, where: str) -> None:
        """What can be judged at any time, also of a run that goes on meanwhile: nothing is read before what it must have followed."""
        run, seen, saved = self.target.run, read(self.journals), checkpoints(self.target.run)
        rows = trained(run)
        held = read_held(run)
        later = read(self.journals)
        self._note_life(held)
        newest = max(saved, default=0)
        found = [
            *judge.clients(seen, held, later),
            *judge.steps(held, GROUPS),
            *judge.kept_consumption(self.before, held, self.saved),
            *judge.trainer(held, rows, saved),
            *judge.accounts(held),
            *(f"areal status: {fault}" for fault in self._books(held)),
        ]
        self.before, self.saved = held, newest
        step = max(held.timeline, default=0)
        answers = sum(len(one.answers) for one in seen.values())
        state = f"step {step}, checkpoint {newest}, {len(held.sessions)} sessions, {answers} answers read"
        self.say(f"{where}: {state}")
        self._found(found, where)

    def _books(self, held: Held) -> tuple[str, ...]:
        """What the run's own accounting finds wrong with itself."""
        if not held.versions:
            return ()  # it died before it had begun
        return tuple(asyncio.run(look(self.target.run)).faults)

    def _found(self, sentences: list[str], where: str) -> None:
        """Keep and say what is new: what was lost once stays lost, and is found again after every later kill."""
        known = {one.partition(": ")[2] for one in self.report.violations}
        for sentence in dict.fromkeys(sentences):
            if sentence not in known:
                self.report.violations.append(f"seed {self.seed}, {where}: {sentence}")
                self.say(self.report.violations[-1])

    def _end(self, clients: list[subprocess.Popen[bytes]]) -> None:
        """Clients finish, the run trains what is left, and everything is compared."""
        (self.folder / "stop").touch()
        for client in clients:
            if client.wait(timeout=2 * SOON_S):
                self._found([f"a client failed: {_outputs(self.folder)}"], "the end")
        run, where = self.target.run, "the end"
        try:
            wait_for(lambda: _waiting(read_held(run)) < GROUPS, "training of the last groups")
        except TimeoutError as error:
            self._found([f"{_waiting(read_held(run))} groups wait and are not trained: {error}"], where)
        seen, held = read(self.journals), read_held(run)
        exported = _exported(self.target.url, [one.session for one in seen.values() if one.session])
        code, said = self.target.stop()
        if code != 0 or "Traceback" in said:
            self._found([f"the run ended with code {code}: {said[-3000:]}"], where)
        self._look(where)
        self._found(self._whole(seen, held, exported), where)
        left = [name for name, _ in self.target.processes()] + sorted(self.watch.published())
        self._found([f"left behind: {', '.join(left)}"] if left else [], where)
        self.report.done = _sums(seen, self.before)

    def _whole(self, seen: dict[str, Seen], held: Held, exported: dict[str, Any]) -> list[str]:
        step, saved = max(held.timeline), checkpoints(self.target.run)
        newest = {
            session: max((max(one["versions"], default=0) for one in body["interactions"]), default=0)
            for session, body in exported.items()
        }
        shown = _names(self.target.run, saved)
        found = [
            *judge.fates(seen, held, newest, trained(self.target.run), LAG),
            *judge.labels(held, exported, self.lives),
            *judge.tokens(seen, exported, shown),
        ]
        if max(saved, default=0) < step:
            found.append(
                f"the run was stopped at step {step} and its newest checkpoint is of step {max(saved, default=0)}"
            )
        return found


def _waiting(held: Held) -> int:
    return sum(group.accepted and group.step is None and not group.dropped for group in held.groups.values())


def _exported(url: str, sessions: list[str]) -> dict[str, Any]:
    """Session -> what the service exports of it."""
    found = {}
    with requests.Session() as http:
        http.trust_env = False
        for session in sessions:
            body = {"session_id": session}
            answer = http.post(f"{url}/rl/export_trajectories", json=body, headers={"x-api-key": ADMIN}, timeout=120)
            answer.raise_for_status()
            found[session] = answer.json()
    return found


def _names(run: Path, saved: dict[int, Checkpoint]) -> list[str]:
    """What each token id is shown as, from the tokenizer that lies in every checkpoint."""
    tokenizer = Tokenizer.from_file(str(run / "checkpoints" / f"step-{max(saved):06d}" / "tokenizer.json"))
    return [str(tokenizer.id_to_token(number)) for number in range(tokenizer.get_vocab_size())]


def _sums(seen: dict[str, Seen], held: Held) -> dict[str, int]:
    return {
        "sessions": len(held.sessions),
        "answers read": sum(len(one.answers) for one in seen.values()),
        "rewards acknowledged": sum(len(one.rewards) for one in seen.values()),
        "ends acknowledged": sum(bool(one.left) for one in seen.values()),
        "steps": max(held.timeline),
        "steps of lost timelines": len(held.versions) - len({one.incarnation for one in held.versions}) - max(held.timeline),
        "groups trained": sum(group.step is not None for group in held.groups.values()),
        "groups dropped as stale": sum(group.dropped == "stale" for group in held.groups.values()),
    }  # fmt: skip


def _outputs(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in folder.glob("client-*.out"))


def _listed(counted: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counted.most_common())
