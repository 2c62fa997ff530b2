"""The only modules that import SGLang; each wraps one part of it.

install   wraps them in, once       frontend   arguments, names, errors
scheduler requests and steps        worker     LoRA manager, linear layers
experts   experts on a CPU
"""
