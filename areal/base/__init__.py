"""The ground every folder stands on: nouns, errors, log lines, metrics. Imports nothing of areal and never torch."""
