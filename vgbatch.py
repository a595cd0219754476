"""The public Python API, and `python -m vgbatch`."""

from jobs.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
