"""Makes a GPT with about the number of parameters that --params gives."""

from __future__ import annotations

import re

from harness.core.job import Workload
from harness.models import named_models

PARAM_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parsed_amount(text: str) -> float | None:
    """Return the number that a text such as 7B, 350m or 1000000000 stands for; None if the text is no positive
    number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.upper())
    return float(match[1]) * PARAM_UNITS[match[2]] if match and float(match[1]) else None


def gpt_of_size(num_params: float) -> Workload:
    """Return the workload of a GPT with about this number of parameters. Its layers are those of the GPT-3 model with
    the nearest number of parameters, and the number of layers makes up the size."""

    def distance(workload: Workload) -> float:
        return max(workload.num_params / num_params, num_params / workload.num_params)

    models = [named_models.load(name) for name in named_models.names() if name.startswith("gpt3-")]
    nearest = min((Workload(**model.sizes) for model in models), key=distance)
    layers = round((num_params - nearest.end_params) / nearest.layer_params)
    return nearest.at_depth(max(1, layers))
