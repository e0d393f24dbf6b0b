"""The `unified-cache` command: one module a subcommand, listed in `_COMMANDS`.

The exit status is the same for all commands:

- 0: done.
- 1: called rightly, but the work could not be done or went wrong: a file that is missing or can not be
  written, a broken trace, a package that is not installed, a wrong answer in the demo, output nobody takes.
- 2: called wrongly: an unknown option, or a value that an option can not have (an `ArgumentError`).
- 130: interrupted.

Whatever is not 0 says why in one line on standard error (argparse shows the usage before it), except that
nothing is said when the reader of the output went away.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from unified_cache import __version__
from unified_cache.cli import bench, demo, doctor, replay, storage
from unified_cache.cli.limited import is_held_up
from unified_cache.errors import ArgumentError, UnifiedCacheError

__all__ = ["main"]

_COMMANDS = (demo, bench, replay, storage, doctor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="unified-cache", description="A hierarchical KV cache for LLM serving."
    )
    parser.add_argument("--version", action="version", version=f"unified-cache {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit status.

    Without one it runs the process's own; that process ends here if a storage holds one of its threads up.
    """
    status = _main(argv)
    if argv is None and is_held_up():
        # What waits for threads, or for what a client has in mind to do at the exit, may never end.
        os._exit(status)
    return status


def _main(argv: Sequence[str] | None) -> int:
    try:
        try:
            arguments = _parser().parse_args(argv)
            status: int = arguments.run(arguments)
        finally:
            _flush()
    except BrokenPipeError:
        return 1
    except (UnifiedCacheError, OSError) as error:
        print(f"unified-cache: {error}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1
    except KeyboardInterrupt:
        print("unified-cache: interrupted", file=sys.stderr)
        return 130
    return status


def _flush() -> None:
    """Write out what was printed. If that fails, it is dropped: Python would try again at its exit."""
    if sys.stdout is None:  # closed before the start: print does nothing then
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
        if isinstance(error, BrokenPipeError):
            raise
        raise OSError(f"the output can not be written ({error.strerror})") from None
