"""The planner: it answers a question by the model first, then by simulation.

flags       options of the commands               scenario     from options to the question
question    what is asked                         loads        its load: instances, cache, steps
instances   how many LLM instances a rate takes
candidates  the layouts that the model accepts    choice       the fewest GPUs of these
verify      what the simulation bears out         judge        what it says of one system
stepped     systems simulated step by step
coupled     the same GPUs without a LoRA Server   split        its memory, for adapters and KV cache
classes     adapters with SLOs of their own       sensitivity  what if the question changes a little
band        how far a plan may be off             fronts       what each way to serve costs, over the rate
"""
