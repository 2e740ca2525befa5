"""Names causes of a departure that the final tensors show: decay left out, a part never trained, one group far off.

The functions compare records, as departures.py does, and return texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.core.job import WEIGHT_DECAY
from harness.core.record import Record
from harness.gate import evidence
from harness.gate.evidence import LEAST
from harness.gate.limits import FEW, NAMING, as_different, median_of

# for each fact that is a share: its verb
SHARES = {"changed": "changed in", "with_gradient": "got a gradient in"}
# a group of tensors is named if its error is this many times the error of all other tensors
OUTSTANDING = 3.0


def partly_trained(record: Record, reference: Record, others: Sequence[Record]) -> str:
    """Return a text on the tensor of which the most elements did not change, or got no gradient, although they do in
    the reference; empty if there are few. `others`: the reference with other roundings."""
    for key, verb in SHARES.items():
        missing = _missing_elements(record, reference, key)
        spreads = [_missing_elements(other, reference, key) for other in others]
        beyond = {
            name: abs(num) - FEW - NAMING * max([0.0, *(abs(spread.get(name, 0.0)) for spread in spreads)])
            for name, num in missing.items()
        }
        if beyond and beyond[worst := max(beyond, key=lambda name: beyond[name])] > 0:
            mine, other = as_different(record.tensors[worst][key], reference.tensors[worst][key], "%")  # type: ignore
            return f"{worst} {verb} {mine} of its elements, {other} in the reference"
    return ""


def _missing_elements(record: Record, reference: Record, key: str) -> dict[str, float]:
    """Return, for each tensor, how many elements fewer a fact holds for than in the reference. `key`: a fact that is a
    share of a tensor's elements, such as `changed`. A tensor of which a record lacks the fact is left out."""
    anatomy, missing = reference.job.workload.anatomy, {}
    shapes = anatomy.ends | anatomy.layer
    for name, tensor in reference.tensors.items():
        share, expected = record.tensors.get(name, tensor).get(key), tensor.get(key)
        if share is not None and expected is not None:
            num_elements = math.prod(shapes.get(anatomy.within(name), (1,)))
            missing[name] = (expected - share) * num_elements  # type: ignore[operator]
    return missing


def without_decay(record: Record, reference: Record) -> str:
    """Return a text if tensors end as if trained without weight decay; empty otherwise. Without decay, matrices are
    larger by the amount that decay takes off, while biases, norms and all other matrices agree. Decay shows late, so
    the first wrong loss or norm would not name this cause."""
    load = record.job.workload
    decay = WEIGHT_DECAY * sum(load.learning_rate_at(step) for step in range(1, record.job.steps + 1))
    growth_by_kind: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for name, ratio in evidence.ratios(record, reference, "size").items():
        growth_by_kind[name.endswith("bias") or ".ln" in name or "norm" in name][name] = ratio - 1
    vector_growth = median_of([0.0, *map(abs, growth_by_kind[True].values())])
    matrix_growth = growth_by_kind[False]
    if vector_growth > decay / 10:
        return ""
    if decay / 2 <= (median := median_of([0.0, *matrix_growth.values()])) <= 2 * decay:
        return f"matrices end {median:.1e} larger than the reference's, where biases and norms agree: as without decay"
    undecayed = [name for name, growth in matrix_growth.items() if decay / 2 <= growth <= 2 * decay]
    if not undecayed or any(
        abs(growth) > decay / 10 for name, growth in matrix_growth.items() if name not in undecayed
    ):
        return ""
    growth = median_of(matrix_growth[name] for name in undecayed)
    others = "where all other tensors agree: as without decay there"
    return f"{evidence.names_text(undecayed)}: {growth:.1e} larger at the end than in the reference, {others}"


def outstanding(record: Record, reference: Record) -> str:
    """Return the name of the group of tensors with a much larger error than all other tensors; empty if there is none.
    A group is the tensors of a layer, all biases, all norms or all matrices."""
    distances = evidence.distances(record, reference)
    groups: dict[str, list[str]] = {}
    for name in distances:
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
        is_norm = ".ln" in name
        groups.setdefault(
            "norms" if is_norm else "biases" if name.endswith("bias") else "matrices", []
        ).append(name)
    ratios = {}
    for group, names in groups.items():
        others = [distance for name, distance in distances.items() if name not in names]
        if others:
            ratios[group] = median_of(distances[name] for name in names) / max(LEAST, median_of(others))
    farthest = max(ratios, key=lambda group: ratios[group], default="")
    return farthest if farthest and ratios[farthest] > OUTSTANDING else ""
