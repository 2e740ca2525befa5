"""Draw case 9 from the CSV that case9_extract.sh wrote. Options: --profile, --results, --out, as for ./run.sh case."""

import os
import sys
from pathlib import Path

os.execv(Path(__file__).parents[1] / "run.sh", ["run.sh", "case", "9", "--draw", *sys.argv[1:]])
