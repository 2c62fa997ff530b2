"""One shard: receive, shrink, expand, send."""
