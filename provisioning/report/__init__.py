"""Reports of a plan.

result       the one plan behind all of these       document     as JSON
render       in words                               words        numbers as people read them
serve_file   as plan.yaml                           emitted      what `--emit` writes
screen       on the terminal                        html         the page of --report
charts       its plots                              provenance   where each number comes from
fronts       what `provision compare` says          glossary     the words of a plan
prefill      what prompts take of the time           classes      what a plan does for SLO classes
"""
