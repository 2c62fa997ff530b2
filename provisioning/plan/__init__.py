"""From a question to a plan: by the model first, then by simulation.

slo           service level objectives            scenario   from flags to the question
candidates    the layouts that the model accepts  choice     the fewest GPUs of these
verify        what the simulation bears out       judge      what it says of one system
coupled       the same GPUs, no LoRA Server       sensitivity  what if the question changes a little
"""
