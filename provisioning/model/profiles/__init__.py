"""Measured profiles that ship with the planner, one JSON file each: used where they fit the question. None yet."""
