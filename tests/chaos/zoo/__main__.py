"""A master or store with a bug: ``python -m tests.chaos.zoo BUG ROLE CONFIG``; no installed release has it."""

from __future__ import annotations

import sys
from pathlib import Path

from kvops.store.config import MasterConfig, StoreConfig, load_yaml
from tests.chaos.zoo.servers import BUGS


def main() -> int:
    """Break what the bug breaks in this process, then serve as kvops does."""
    bug, role, file = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    broken = BUGS[bug]
    if role == broken.role:
        broken.apply()
    if role == "master":
        from kvops.store.master import serve as serve_master

        return serve_master(load_yaml(file, MasterConfig))
    from kvops.store.node import serve as serve_store

    return serve_store(load_yaml(file, StoreConfig))


if __name__ == "__main__":
    sys.exit(main())
