"""From service level objectives to a number of GPUs."""
