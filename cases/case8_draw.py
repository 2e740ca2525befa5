"""Draw case 8 from the CSV of case8_extract.sh; options --profile, --results and --out as for the case."""

import os
import sys
from pathlib import Path

os.execv(Path(__file__).parents[1] / "run.sh", ["run.sh", "case", "8", "--draw", *sys.argv[1:]])
