"""Draws case 2 from the CSV that case2_extract.sh wrote; --profile, --results, --out as for the case."""

import os
import sys
from pathlib import Path

door = str(Path(__file__).resolve().parent.parent / "run.sh")
os.execv(door, [door, "case", "2", "--draw", *sys.argv[1:]])
