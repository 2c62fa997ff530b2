"""Decode instances with continuous batching, over coupled or shared adapter caches, event by event.

run       the rules, the event loop, and a run from requests to times
state     its caches, adapters and instances
router    the LoRA-aware router of coupled instances
steps     engines step by step, as vLLM schedules
measure   what is read off a run, with an interval over seeds
"""
