"""Workloads: calls of adapters, their times and their tokens.

workload          popularity, lengths and burstiness, and calls sampled from them
requests          a sequence of calls, and the laws that lengths and gaps are drawn from
replay            a trace's load and mix of adapters over time, its peak, and what of it is replayed
days              other days of a trace: the process that is fitted to it
together          adapters whose load moves together: tenants
counts            reads calls per adapter (JSON, CSV)
traces            reads traces (CSV, JSONL)
servegen          a ServeGen directory: servegen_windows reads its rates, servegen_lengths its lengths
"""
