# SPDX-License-Identifier: Apache-2.0
"""Check that every source file that git tracks names its licence in the first lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEADER = "SPDX-License-Identifier: Apache-2.0"
SOURCES = {".py", ".sh", ".yaml", ".yml", ".toml", ".j2"}
NAMES = {"Makefile", "run"}
LINES = 3


def main() -> int:
    """Print the files that lack the header; exit 1 if there are any."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True, text=True).stdout
    sources = [
        path
        for name in listed.split("\0")
        if name and ((path := Path(name)).suffix in SOURCES or path.name in NAMES)
    ]
    missing = [
        path
        for path in sources
        if path.exists() and HEADER not in "".join(path.open(encoding="utf-8").readlines()[:LINES])
    ]
    for path in missing:
        print(f"{path}: no '{HEADER}' in the first {LINES} lines", file=sys.stderr)
    if not sources:
        print("no source files found: run this inside the repository", file=sys.stderr)
    return 1 if missing or not sources else 0


if __name__ == "__main__":
    sys.exit(main())
