"""What we measure. Each module prints a table, and JSON with --json; ratios of one run, not times."""
