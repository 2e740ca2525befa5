"""Draw case 7 from the CSV of case7_extract.sh. Options: --profile, --results, --out, as for ./run.sh case."""

import os
import sys
from pathlib import Path

os.execv(Path(__file__).parents[1] / "run.sh", ["run.sh", "case", "7", "--draw", *sys.argv[1:]])
