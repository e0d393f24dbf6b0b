"""The `unified-cache` command: one module a subcommand, listed in `_COMMANDS`."""

import argparse
import sys
from collections.abc import Sequence

from unified_cache import __version__
from unified_cache.cli import demo, replay
from unified_cache.errors import UnifiedCacheError

__all__ = ["main"]

_COMMANDS = (demo, replay)


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
    """Run the command line `argv` (default: the process's own) and return the exit status.

    0: done. 1: the command could not do its work, and said why in one line. 2: it was called wrongly.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (UnifiedCacheError, OSError) as error:
        print(f"unified-cache: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("unified-cache: interrupted", file=sys.stderr)
        return 130
    return status
