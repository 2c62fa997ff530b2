"""The engine core: scheduler, KV block hashes."""
