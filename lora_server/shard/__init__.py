"""One shard: receive, shrink, expand, send.

loop          takes steps, serves them, answers      request        the bytes of a slot, checked
schedule      which step is next                     coordination   alone, or as the stage's leader says
compute       on the host, or on a GPU      orders         how that travels
phases        how long steps take, and where
pump          the host of a kernel that serves by itself, and numbers its part in leader mode
"""
