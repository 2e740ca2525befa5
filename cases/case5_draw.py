"""Draw case 5 from the CSV of case5_extract.sh. Options: --profile, --results, --out, as for ./run.sh case."""

import os
import sys
from pathlib import Path

os.execv(Path(__file__).parents[1] / "run.sh", ["run.sh", "case", "5", "--draw", *sys.argv[1:]])
