"""`python -m unified_cache` is the `unified-cache` command."""

import sys

from unified_cache.cli import main

if __name__ == "__main__":
    sys.exit(main())
