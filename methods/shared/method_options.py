"""Options that several methods have, as the command line spells them."""

from __future__ import annotations

from harness.core.option import Option

RANKS = Option(("--ranks",), "Number of processes that train one model.")
DISK = Option(("--disk",), "Folder for states that are kept on the disk.", metavar="DIR", is_short=True)
