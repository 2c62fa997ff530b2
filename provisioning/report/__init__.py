"""What is said about a plan.

result       the one document behind all of these   provenance   where each number comes from
render       the table, and plan.yaml               html         the page of --report
charts       its plots
"""
