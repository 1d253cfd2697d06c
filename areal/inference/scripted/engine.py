"""Plays a script: a Backend in this process that samples nothing and answers everything from a file.

    engine = ScriptedEngine(read_script(path))
    async with aclosing(engine.generate(request)) as chunks: ...

A request is answered by the first `when` pattern in the file that its prompt matches, else by the lines without one.
Lines of one pattern (or of none) are played in order, for each session on its own, and start over at the end. max_tokens and
stop_token_ids are honoured; temperature and seed change nothing. Weights have a label and nothing else: a token carries
the one it was sent under. Served by server.py; format: script.py.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec

from areal.base.errors import ArealError, BackendError, ContextOverflow
from areal.base.types import FinishReason, GenerateRequest, TokenChunk
from areal.inference.backend import BackendHealth
from areal.inference.scripted.script import Failure, Script, ScriptedLine, ScriptedToken
from areal.inference.swap import Swap

MAX_SESSIONS = 10_000  # whose place in the script is remembered; the longest unused one is forgotten first
MAX_CALLS = 1000  # listed by /calls


class ScriptedFailure(BackendError):
    """The failure a script asks for; as an HTTP answer it has the script's status."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.status = failure.status


@dataclass(slots=True)
class Call:
    """One request as /calls shows it. state: running, finished, aborted (the client left) or failed."""

    request_id: str
    session_id: str
    prompt_tokens: int
    line: int
    sent: int = 0
    state: str = "running"


class ScriptedEngine:
    """A backend.Backend. One event loop, any number of tasks."""

    def __init__(self, script: Script, *, version: int = 0) -> None:
        self._script = script
        self._groups: dict[re.Pattern[str] | None, list[ScriptedLine]] = {}  # lines that are played in turn
        for line in script.lines:
            self._groups.setdefault(line.when, []).append(line)
        self._patterns = [pattern for pattern in self._groups if pattern is not None]
        self._version = version
        self._open = asyncio.Event()  # set: not paused
        self._open.set()
        self._places: OrderedDict[str, Counter[re.Pattern[str] | None]] = OrderedDict()
        self._calls: OrderedDict[int, Call] = OrderedDict()
        self._serial = 0
        self._counts: Counter[str] = Counter()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """See Backend.generate. One chunk a token; the last one carries the finish reason."""
        if len(request.prompt_ids) >= self._script.max_context:
            raise ContextOverflow(len(request.prompt_ids), self._script.max_context)
        line = self._choose(request)
        call = self._begin(request, line)
        outcome = "aborted"  # what it is if the client leaves: then neither of the next two happens
        try:
            async for chunk in self._play(line, request):
                call.sent += len(chunk.token_ids)
                if chunk.finish_reason is not None:
                    outcome = "finished"
                yield chunk
        except ArealError:
            outcome = "failed"
            raise
        finally:
            call.state = outcome
            self._counts["running"] -= 1
            self._counts[outcome] += 1

    async def health(self) -> BackendHealth:
        """A script needs no KV cache: kv_tokens_free is its whole context."""
        running = self._counts["running"]
        context = self._script.max_context
        waiting = 0 if self._open.is_set() else running
        return BackendHealth("scripted", self._version, context, running - waiting, waiting, context)

    async def pause(self) -> None:
        """See Backend.pause. A token whose delay has begun waits too."""
        self._open.clear()

    async def resume(self) -> None:
        """See Backend.resume."""
        self._open.set()

    async def load_weights(self, manifest: dict[str, Any], version: int, *, within_s: float | None = None) -> int:
        """Takes the label, by the rule of swap.py; the manifest is not read, there are no weights."""
        self._version = Swap(self._version).asked(version).labelled(version).label
        return self._version

    async def close(self) -> None:
        """Nothing is held."""

    def calls(self) -> bytes:
        """JSON for tests and people: counts by state, and the newest calls in order of arrival."""
        counts = {state: self._counts[state] for state in ("running", "finished", "aborted", "failed")}
        return msgspec.json.encode({**counts, "version": self._version, "calls": list(self._calls.values())})

    async def _play(self, line: ScriptedLine, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        limit = request.sampling.max_tokens or len(line.tokens)
        for index, token in enumerate(line.tokens):
            await self._fail_if_due(line, index)
            if token.delay_s:
                await asyncio.sleep(token.delay_s)
            await self._open.wait()
            finish: FinishReason | None = None
            if token.token_id in request.sampling.stop_token_ids:
                finish = "stop"
            elif index + 1 == len(line.tokens) and not _fails_at(line, index + 1):
                finish = line.finish
            elif index + 1 == limit:
                finish = "length"
            yield self._chunk(token, request.sampling.top_logprobs, finish)
            if finish is not None:
                return
        await self._fail_if_due(line, len(line.tokens))
        yield TokenChunk((), (), (), (), finish_reason=line.finish)  # a line without pieces

    async def _fail_if_due(self, line: ScriptedLine, index: int) -> None:
        if line.failure is not None and _fails_at(line, index):
            await self._open.wait()
            raise ScriptedFailure(line.failure)

    def _chunk(self, token: ScriptedToken, wanted: int, finish: FinishReason | None) -> TokenChunk:
        top = ((token.top or ((token.token_id, token.logprob),))[:wanted],) if wanted else ()
        return TokenChunk(
            token_ids=(token.token_id,),
            logprobs=(token.logprob,),
            versions=(self._version,),
            kept_mass=(1.0,),
            top=top,
            finish_reason=finish,
        )

    def _choose(self, request: GenerateRequest) -> ScriptedLine:
        """The line that answers. Raises BackendError if the script has none for this prompt."""
        group: re.Pattern[str] | None = None
        if self._patterns:
            prompt = self._script.vocabulary.decode(request.prompt_ids.tolist(), skip_special=False)
            group = next((pattern for pattern in self._patterns if pattern.search(prompt)), None)
        lines = self._groups.get(group)
        if lines is None:
            raise BackendError(f'no line of {self._script.path} fits this prompt; add one without "when"')
        places = self._places.setdefault(request.session_id, Counter())
        self._places.move_to_end(request.session_id)
        if len(self._places) > MAX_SESSIONS:
            self._places.popitem(last=False)
        places[group] += 1
        return lines[(places[group] - 1) % len(lines)]

    def _begin(self, request: GenerateRequest, line: ScriptedLine) -> Call:
        call = Call(request.request_id, request.session_id, len(request.prompt_ids), line.number)
        self._serial += 1
        self._calls[self._serial] = call
        if len(self._calls) > MAX_CALLS:
            self._calls.popitem(last=False)
        self._counts["running"] += 1
        return call


def _fails_at(line: ScriptedLine, index: int) -> bool:
    return line.failure is not None and line.failure.at == index
