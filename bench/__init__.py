"""Benches. Each module prints a table, and JSON with --json; its figures are ratios of one run, not times."""
