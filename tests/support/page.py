"""The examples of CONTRIBUTING.md, as they stand there."""

from __future__ import annotations

import re

from harness.base.checkout import ROOT


def page_blocks(language: str) -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
