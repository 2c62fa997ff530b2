"""Engine workers: experts."""
