"""The main module of a replica's process: `slotwise serve`, which ends with the front door that started it."""

from __future__ import annotations

import sys

from slotwise.platform import spawn

if __name__ == "__main__":
    spawn.end_with_parent()
    from slotwise.cli import main

    sys.exit(main(["serve", *sys.argv[1:]]))
