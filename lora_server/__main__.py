"""`lora-server`, and `python -m lora_server`, which is the same."""

from lora_server import installed


def main() -> None:
    """Console script: where the server's extra is missing, one line says so."""
    installed.start("server")
    from lora_server import cli

    cli.main()


if __name__ == "__main__":
    main()
