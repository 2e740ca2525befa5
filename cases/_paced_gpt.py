"""Runs examples/own_gpt.py with slower steps. The environment variable PACE_FILE names a file that holds the least
seconds of a step. The file may change at any time.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from harness.base.checkout import ROOT


def main() -> None:
    spec = importlib.util.spec_from_file_location("own_gpt", ROOT / "examples" / "own_gpt.py")
    assert spec and spec.loader
    own_gpt: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_gpt)

    class PacedText(own_gpt.Text):
        def batch(self, step: int, batch_size: int) -> dict[str, Any]:
            time.sleep(float(Path(os.environ["PACE_FILE"]).read_text()))
            return super().batch(step, batch_size)

    own_gpt.main(text_class=PacedText)


if __name__ == "__main__":
    main()
