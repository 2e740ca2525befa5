"""The rows and columns of case 10's map: engines with their releases, and settings of these engines.

A row of the map is a setting, a column is a release. A new release needs no change here (`./run.sh releases
--release`). A new setting is an entry of SETTING_ROWS, a new engine one of ENGINES.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from harness.core import method
from methods.engines.release import Release
from methods.engines.user_config import config_text

OPTION = "release"  # option of a method that runs other releases of its engine than the installed one


@dataclass(frozen=True)
class MapEngine:
    """An engine and its releases, oldest first. `script`: the template beside this file from which --script makes a
    script; empty: there is none."""

    package: str  # name on the package index
    releases: tuple[str, ...] = ()
    script: str = ""

    @property
    def installed(self) -> str | None:
        """The version of the installed release; None if none is installed."""
        try:
            # a build of torch names its device behind a +
            return metadata.version(self.package).partition("+")[0]
        except metadata.PackageNotFoundError:
            return None

    @property
    def columns(self) -> list[str]:
        """Return the releases of the map, oldest first: those of the table, and the installed one."""
        return ordered([*self.releases, *filter(None, [self.installed])])


@dataclass(frozen=True)
class MapRow:
    """A setting of an engine. `unseen`: what a run on a CPU of these sizes cannot show, each as a key of UNSEEN."""

    engine: str  # a key of ENGINES
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    # fields in which it differs from the map's workload
    workload: Mapping[str, Any] = field(default_factory=dict)
    since: str = ""  # first release that has the setting; empty: all have it
    by_design: str = ""  # why it trains otherwise than the reference; empty: it should not
    design_until: str = ""  # last release that trains otherwise by design alone; empty: all do
    unseen: tuple[str, ...] = ()
    is_scripted: bool = True  # False: --script makes no script of this row

    def design_of(self, release: str) -> str:
        """Return why this release trains otherwise than the reference by design; empty: it should not."""
        return self.by_design if not self.design_until or order(release) <= order(self.design_until) else ""


def order(release: str) -> tuple[int, ...]:
    """Return the place of a release among others, as a value to compare; that of an empty text is the first. Raises
    ValueError if the text is no version."""
    return Release("an engine", release).numbers if release else ()


def ordered(releases: Iterable[str]) -> list[str]:
    return sorted(set(releases), key=order)


ENGINES = {
    "deepspeed": MapEngine(
        "deepspeed",
        (
            "0.14.0",
            "0.14.1",
            "0.14.2",
            "0.14.3",
            "0.14.4",
            "0.14.5",
            "0.15.0",
            "0.15.1",
            "0.15.2",
            "0.15.3",
            "0.15.4",
            "0.16.0",
            "0.16.1",
            "0.16.2",
            "0.16.3",
            "0.16.4",
            "0.16.5",
            "0.16.6",
            "0.16.7",
            "0.16.8",
            "0.16.9",
            "0.17.0",
            "0.17.1",
            "0.17.2",
            "0.17.3",
            "0.17.4",
            "0.17.5",
            "0.17.6",
            "0.18.0",
            "0.18.1",
            "0.18.2",
            "0.18.3",
            "0.18.4",
            "0.18.5",
            "0.18.6",
            "0.18.7",
            "0.18.8",
            "0.18.9",
            "0.19.0",
            "0.19.1",
            "0.19.2",
            "0.19.3",
            "0.19.4",
            "0.19.5",
            "0.19.6",
            "0.19.7",
            "0.19.8",
        ),
        "_release_script.py.j2",
    ),
    "megatron-core": MapEngine(
        "megatron-core",
        (
            "0.12.0",
            "0.12.1",
            "0.12.2",
            "0.12.3",
            "0.13.0",
            "0.13.1",
            "0.14.0",
            "0.15.0",
            "0.15.1",
            "0.15.2",
            "0.15.3",
            "0.16.0",
            "0.16.1",
        ),
    ),
    # Each of these imports beside newer packages than it knows, see methods/engines/release.py.
    "transformers": MapEngine(
        "transformers",
        (
            "4.45.2",
            "4.46.3",
            "4.57.6",
            "5.0.0",
            "5.5.4",
            "5.9.0",
            "5.10.4",
            "5.12.1",
            "5.14.1",
            "5.16.1",
            "5.18.0",
            "5.20.2",
            "5.22.2",
            "5.23.0",
        ),
    ),
    "fsdp2": MapEngine("torch"),  # only the installed release runs
}

# What a run on a CPU of these sizes cannot show, by a short name.
UNSEEN = {
    "streams": "a missing wait between streams: on a CPU nothing runs on streams of its own",
    "copies": "a copy that is read too early: on a CPU no buffer is page-locked and no copy is asynchronous",
    "ranks": "a wrong sum over ranks: one rank sums nothing",
    "buckets": "a fault between two buckets of gradients: the whole model fills one",
    "gloo": "a process group that lacks the CPU: on a CPU the group is gloo's",
    "tokens": "a mean over micro-batches that have other numbers of tokens: all samples are equally long",
    "norms": "a wrong gradient norm: stage 0 tells none in fp32",
    "all": "anything: the method runs on NVIDIA GPUs only",
}


def _zero(
    stage: int,
    offload: str | None = None,
    *,
    parts: int = 1,
    dtype: str = "fp32",
    clip: float = 1.0,
    **options: Any,
) -> MapRow:
    """Return the row of a stage of ZeRO. `parts`: micro-batches."""
    load = {"micro_batches": parts, "dtype": dtype, "clip_norm": clip}
    lacks = {
        "copies": offload is not None,
        "ranks": "world_size" not in options,
        "buckets": 0 < stage < 3,
        "streams": stage == 3 or "overlap_comm" in options,
        "norms": stage == 0 and dtype == "fp32",
    }
    return MapRow(
        "deepspeed",
        "deepspeed",
        {"stage": stage, "offload": offload, **options},
        load,
        unseen=tuple(name for name, is_lacking in lacks.items() if is_lacking),
    )


def _zero_by_trainer(**entries: Any) -> MapRow:
    """Return the row of Trainer with a configuration of ZeRO stage 2 that has these further entries."""
    config = config_text({"zero_optimization": {"stage": 2, **entries}})  # as the record of a run holds it
    lacks = ("ranks", "buckets", "tokens", *(("copies",) if entries else ()))
    return MapRow("transformers", "hf-trainer", {"config": config}, {"micro_batches": 4}, unseen=lacks)


ZENFLOW_LACKS = ("copies", "streams", "ranks")
LATE = "most gradients are applied some steps late"

# The rows of the map, one for each setting of an engine, by the setting's name. In a name, 4 stands for four
# micro-batches, and `caller` for several backward passes before one step, of which the last is marked; `unmarked`: none
# is marked.
SETTING_ROWS = {
    "stage-0": _zero(0),
    "stage-0-4": _zero(0, parts=4),
    "stage-0-bf16": _zero(0, dtype="bf16"),
    "stage-0-4-bf16": _zero(0, parts=4, dtype="bf16"),
    "stage-1": _zero(1),
    "stage-1-4": _zero(1, parts=4),
    "stage-2": _zero(2),
    "stage-2-4": _zero(2, parts=4),
    "stage-2-4-bf16": _zero(2, parts=4, dtype="bf16"),
    "stage-2-4-caller": _zero(2, parts=4, accumulation="caller"),
    "stage-2-4-unmarked": _zero(2, parts=4, accumulation="unmarked"),
    "stage-2-no-clip": _zero(2, clip=0.0),
    "stage-3": _zero(3),
    "stage-3-4": _zero(3, parts=4),
    "stage-1-offload": _zero(1, "optimizer"),
    "stage-1-offload-4": _zero(1, "optimizer", parts=4),
    "stage-2-offload": _zero(2, "optimizer"),
    "stage-2-offload-4": _zero(2, "optimizer", parts=4),
    "stage-2-offload-4-bf16": _zero(2, "optimizer", parts=4, dtype="bf16"),
    "stage-2-offload-4-no-clip": _zero(2, "optimizer", parts=4, clip=0.0),
    "stage-2-offload-4-caller": _zero(2, "optimizer", parts=4, accumulation="caller"),
    "stage-3-offload": _zero(3, "optimizer"),
    "stage-3-offload-4": _zero(3, "optimizer", parts=4),
    "stage-3-offload-all": _zero(3, "all"),
    "stage-3-offload-all-4": _zero(3, "all", parts=4),
    "stage-2-4-overlap-2-ranks": _zero(2, parts=4, overlap_comm=True, world_size=2),
    "stage-2-offload-4-2-ranks": _zero(2, "optimizer", parts=4, world_size=2),
    "stage-3-4-2-ranks": _zero(3, parts=4, world_size=2),
    # 0.19.7 and 0.19.8 store every matrix transposed when they start in fp32.
    "zenflow": MapRow("deepspeed", "zenflow", {}, {}, "0.17.5", LATE, "0.19.6", ZENFLOW_LACKS),
    "zenflow-bf16": MapRow(
        "deepspeed", "zenflow", {}, {"dtype": "bf16"}, "0.17.5", LATE, unseen=ZENFLOW_LACKS
    ),
    "superoffload": MapRow("deepspeed", "superoffload", since="0.18.0", unseen=("all",), is_scripted=False),
    "megatron": MapRow("megatron-core", "megatron-lm", unseen=("ranks",)),
    "megatron-4": MapRow("megatron-core", "megatron-lm", workload={"micro_batches": 4}, unseen=("ranks",)),
    "megatron-4-sequence-parallel-2-ranks": MapRow(
        "megatron-core",
        "megatron-lm",
        {"world_size": 2, "tensor_parallel": 2, "sequence_parallel": True},
        {"micro_batches": 4},
    ),
    "hf-trainer": MapRow("transformers", "hf-trainer", unseen=("ranks",)),
    "hf-trainer-4": MapRow(
        "transformers", "hf-trainer", {}, {"micro_batches": 4}, unseen=("ranks", "tokens")
    ),
    "hf-trainer-4-bf16": MapRow(
        "transformers", "hf-trainer", {}, {"micro_batches": 4, "dtype": "bf16"}, unseen=("ranks", "tokens")
    ),
    "hf-trainer-deepspeed-stage-2-4": _zero_by_trainer(),
    "hf-trainer-deepspeed-stage-2-offload-4": _zero_by_trainer(offload_optimizer={"device": "cpu"}),
    "fsdp2": MapRow("fsdp2", "fsdp2-offload", unseen=("gloo", "copies", "streams", "ranks")),
    "fsdp2-4": MapRow(
        "fsdp2", "fsdp2-offload", {}, {"micro_batches": 4}, unseen=("gloo", "copies", "streams", "ranks")
    ),
    "fsdp2-4-2-ranks": MapRow(
        "fsdp2",
        "fsdp2-offload",
        {"world_size": 2},
        {"micro_batches": 4},
        unseen=("gloo", "copies", "streams"),
    ),
}


def columns_of(name: str) -> list[str]:
    """Return the releases of a row, oldest first. A method without OPTION runs the installed one only."""
    row, engine = SETTING_ROWS[name], ENGINES[SETTING_ROWS[name].engine]
    releases = engine.columns
    if OPTION not in method.option_names(method.load(row.method)):
        releases = [release for release in releases if release == engine.installed]
    return [release for release in releases if order(row.since) <= order(release)]
