"""The command, which may be interrupted while it is still being imported."""

import atexit
import os
import sys

_code = 1


def main() -> None:
    global _code
    atexit.register(_leave)  # before anything else is: it comes after all of that
    try:
        from calibeam.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        run()
    except SystemExit as end:
        _code = int(end.code or 0)
        raise


def _leave() -> None:
    """Threads of `torch.distributed` live on after it, and now and then one aborts an interpreter that goes. So it stays."""
    distributed = sys.modules.get("calibeam.distributed")
    if distributed and distributed.has_met():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code)


if __name__ == "__main__":
    main()
