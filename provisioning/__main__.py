"""`python -m provisioning` is `provision`."""

from provisioning.cli import main

if __name__ == "__main__":
    main()
