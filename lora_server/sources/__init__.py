"""Adapters that come from far: fetched into a node's disk cache, whose files all its processes share. And the server's
own copies of those that were added from this host.

remote   the files behind a URL, by fsspec      retries  which of its errors may pass
cache    what lies on this node's disk          fetch    from the one into the other
copies   of adapters that were added from this host
"""
