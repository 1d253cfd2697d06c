"""Which model name of a session means the policy, where its agent asks under several.

    policy = PolicyName()
    policy.is_side_request("small", tools=False, always={"default"})      # before the call
    former = policy.note("large", tools=True, always={"default"})         # when it is made: a name that turned out to be a helper's
    policy.recorded("large", tools=True)                                  # an answer of the policy, as the store has it

The first name of a session is the policy (settled 16), but an agent's helper may speak first: opencode has a smaller model write the
title before its own first turn. A helper is asked without tools. So a name that is asked with tools takes the place of one that never
was; the configured names always are the policy and are never replaced. Pure state. Used by conversation.py and recorder.py.
"""

from __future__ import annotations

from collections.abc import Set


class PolicyName:
    """One session's. `always`: the names that mean the policy in every session of the run."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._had_tools = False

    def is_side_request(self, model: str, *, tools: bool, always: Set[str]) -> bool:
        """Whether a call under this name, with or without tools, is one for a helper of the agent."""
        if self._name is None or model == self._name or model in always:
            return False
        return not self._replaced_by(tools, always)

    def recorded(self, model: str, *, tools: bool) -> None:
        """A stored answer that is no side request: the first of them names the policy, and none replaces it."""
        if self._name in (None, model):
            self._name = model
            self._had_tools = self._had_tools or tools

    def note(self, model: str, *, tools: bool, always: Set[str]) -> str | None:
        """Take note of a call; the name whose calls so far were side requests, where this call shows it."""
        former = self._name
        if former is None or model == former:
            self._name = model
            self._had_tools = self._had_tools or tools
            return None
        if model in always or not self._replaced_by(tools, always):
            return None
        self._name, self._had_tools = model, True
        return former

    def _replaced_by(self, tools: bool, always: Set[str]) -> bool:
        return tools and not self._had_tools and self._name not in always
