"""A running server beside its plan: what its metrics say, and how many GPUs that asks for.

scrape     /metrics, read, saved and parsed
measured   what happened between scrapes
planned    the plan that a plan.yaml holds
advice     measured over planned; GPUs for what was measured
autoscale  looks, and the resizes that follow from them
said       all of it on the terminal
"""
