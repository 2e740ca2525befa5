"""Draws case 6 from the CSV that case6_extract.sh wrote; --profile, --results, --out as for the case."""

import os
import sys
from pathlib import Path

door = str(Path(__file__).resolve().parent.parent / "run.sh")
os.execv(door, [door, "case", "6", "--draw", *sys.argv[1:]])
