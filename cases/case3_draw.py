"""Draw case 3 from the CSV of case3_extract.sh. Options: --profile, --results, --out, as for ./run.sh case."""

import os
import sys
from pathlib import Path

os.execv(Path(__file__).parents[1] / "run.sh", ["run.sh", "case", "3", "--draw", *sys.argv[1:]])
