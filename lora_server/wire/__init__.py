"""What travels between clients, shards and the controller: slot layout, control messages, protos."""
