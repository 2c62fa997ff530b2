"""The only modules that import SGLang; each wraps one part of it.

install     wraps them in, once         arguments   what is refused and set
frontend    names, errors               scheduler   requests and steps
worker      LoRA manager, model         experts     experts on a CPU
"""
