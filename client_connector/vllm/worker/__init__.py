"""Engine workers: model runner, linear layers."""
