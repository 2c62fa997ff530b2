"""Who calls which adapter, when, and for how many tokens.

workload   popularity, lengths and burstiness, and calls sampled from them
requests   a sequence of calls, and the laws that lengths and gaps are drawn from
counts     reads calls per adapter (JSON, CSV)
traces     reads traces (CSV, JSONL)
servegen   reads a ServeGen directory
"""
