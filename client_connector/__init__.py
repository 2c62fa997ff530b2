"""What engines import: an engine-neutral client, the routing of rows, and one hook per engine."""
