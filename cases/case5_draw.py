"""Draws case 5 from the CSV that case5_extract.sh wrote; --profile, --results, --out as for the case."""

import os
import sys
from pathlib import Path

door = str(Path(__file__).resolve().parent.parent / "run.sh")
os.execv(door, [door, "case", "5", "--draw", *sys.argv[1:]])
