"""Compile what a method's engine needs, once, in a process of its own, never inside a run that is timed.

The order is one JSON object on standard input: method, options, folders.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.core import method


def main() -> None:
    order = json.load(sys.stdin)
    folders = tuple(Path(folder) for folder in order["folders"])
    method.create(order["method"], order["options"], folders).build()


if __name__ == "__main__":
    main()
