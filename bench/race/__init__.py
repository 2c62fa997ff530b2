"""Serving engines side by side under the same requests: `make race`, see `__main__`."""
