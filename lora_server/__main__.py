"""`python -m lora_server` is `lora-server`."""

from lora_server.cli import main

if __name__ == "__main__":
    main()
