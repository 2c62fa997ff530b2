"""Hooks of one vLLM part each; `install` wraps them in."""
