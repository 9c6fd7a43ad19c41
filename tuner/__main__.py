"""`python -m tuner` and the command `tuner`."""

from __future__ import annotations


def main() -> None:
    """Run the command line; Ctrl-C while it is still being loaded ends it as it does later."""
    try:
        from tuner.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # errors.Exit.INTERRUPTED, which may not be loaded yet
    run()


if __name__ == "__main__":
    main()
