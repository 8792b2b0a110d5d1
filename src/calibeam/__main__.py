"""The command, which may be interrupted while it is still being imported."""

import sys


def main() -> None:
    try:
        from calibeam.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
