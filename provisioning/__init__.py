"""Plan GPUs for service level objectives. Each folder imports only those named before it.

arrays, inputs   array types; what a user gives, checked
iar              how often an adapter is in the cache, or can be put there, at once
workload         calls of adapters, their times and their tokens
model            how many adapters fit, and what a step takes
simulation       decode instances over adapter caches, event by event
plan             the layouts that meet the SLOs, by the model and then by simulation
report           what is said about a plan
watch            a running server beside its plan
cli              the `provision` command
"""
