"""Small models and adapters with random weights, made on the spot: for the demo, the tests and the benches."""
