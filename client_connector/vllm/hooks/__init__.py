"""The only modules that import vLLM; each wraps one part of it.

install   wraps them in, once       frontend   configuration, names, errors
engine    scheduler, KV hashes      worker     model runner, linear layers
moe       experts
"""
