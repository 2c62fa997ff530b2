"""The API server and LLM: configuration, names, errors."""
