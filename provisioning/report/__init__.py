"""What is said about a plan.

result       the one plan behind all of these       document     as JSON
render       in words, and as plan.yaml             words        numbers as people read them
screen       on the terminal                        html         the page of --report
emitted      what `--emit` writes
charts       its plots                              provenance   where each number comes from
"""
