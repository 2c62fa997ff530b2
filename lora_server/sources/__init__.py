"""Sources of adapters: remote ones are fetched into a node's disk cache, local ones copied into the server's data.

urls     accepted and listed URLs               redirects  checks of redirects, and of addresses
remote   files behind a URL, by fsspec, and which of its errors are transient
cache    the disk cache of a node               fetch      from a URL into the cache
copies   the server's own copies of adapters that were added from this host
"""
