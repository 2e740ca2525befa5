"""Writes a script that shows a cell of case 10 without this project's code: torch's AdamW beside the engine."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from cases._releases import ENGINES, SETTING_ROWS
from cases.case10 import workload_of
from harness.core import method
from harness.devices import machine
from methods.engines.release import Release

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # names in torch


def script(name: str, release: str | None = None) -> str:
    """Return the script of a cell: a row, by its name, and a release; None: the installed one. Raises ValueError for an
    unknown row, for a row without a script, and for a text that is no version."""
    import jinja2

    scripted_names = [
        name for name, row in SETTING_ROWS.items() if ENGINES[row.engine].script and row.is_scripted
    ]
    if name not in scripted_names:
        raise ValueError(f"--script: expected a setting of {', '.join(scripted_names)}, got {name!r}")
    engine = ENGINES[SETTING_ROWS[name].engine]
    if not (release := release or engine.installed):
        raise ValueError(
            f"--script: expected a release of {engine.package}, got none; try {name}@{engine.releases[-1]}"
        )
    Release(engine.package, release)  # raises ValueError if it is no version
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template(engine.script).render(_script_settings(name), name=name, release=release)


def _script_settings(name: str) -> dict[str, Any]:
    """Return what a script of DeepSpeed differs in: the configuration with which the cell's run trains, and how its
    loop calls the engine."""
    from methods.engines.deepspeed import engine_config
    from methods.engines.deepspeed_method import DeepSpeedMethod

    row, load = SETTING_ROWS[name], workload_of(name)
    trained = method.create(row.method, dict(row.options))
    assert isinstance(trained, DeepSpeedMethod)
    config = engine_config(load, trained.settings(load, is_on_gpu=False))
    ranks = trained.world_size
    return {
        "config": textwrap.fill(repr(config), 108, subsequent_indent=" " * 10, break_on_hyphens=False),
        "parts": load.micro_batches,
        "clip": load.clip_norm,
        "is_engines_adam": "optimizer" in config,
        "rate": config["optimizer"]["params"]["lr"] if "optimizer" in config else 0.01,
        "dtype": DTYPES[load.dtype],
        "batch_size": load.batch_size,
        "accumulation": trained.accumulation,
        "torch": str(machine.software()["torch"]).partition("+")[0],
        "command": f"torchrun --nproc-per-node {ranks}" if ranks > 1 else "python",
    }
