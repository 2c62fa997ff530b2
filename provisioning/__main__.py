"""`provision`, and `python -m provisioning`, which is the same."""

from lora_server import installed


def main() -> None:
    """Console script: where the extra is missing, one line says so."""
    installed.start("provision")
    from provisioning.cli import main as run

    run()


if __name__ == "__main__":
    main()
