"""areal: reinforcement learning for LLM agents by changing one base URL."""

__version__ = "1.0.0"
