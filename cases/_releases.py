"""The table of case 10: engines and their releases, settings of these engines, and public reports of wrong trainings.

A row of the map is a setting, a column is a release. A new release needs no change here (`./run.sh releases
--release`). A new setting is an entry of ROWS, a new engine one of ENGINES. Each public report names the rows that
should show it, or the reason why there is no such row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from harness.core import method
from methods.engines.release import Release
from methods.engines.user_config import text_of

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


@dataclass(frozen=True)
class PublicReport:
    """A public report of a wrong training. `threads`: its discussions, as OWNER/REPOSITORY#NUMBER."""

    threads: tuple[str, ...]
    says: str
    since: str = ""  # first release that it is about; empty: the table's first one, too
    until: str = ""  # last release that it is about; empty: no release is known to be right
    rows: tuple[str, ...] = ()  # keys of ROWS that should show it
    is_error: bool = False  # True: training ends in an error; False: it is wrong
    needs_gpu: bool = False  # True: a CPU cannot show it
    why_no_row: str = ""

    @property
    def links(self) -> str:
        """Return the threads as links in Markdown."""
        made = []
        for thread in self.threads:
            repository, _, number = thread.partition("#")
            made.append(
                f"[{repository.rpartition('/')[2]} {number}](https://github.com/{repository}/issues/{number})"
            )
        return ", ".join(made)

    def is_about(self, release: str) -> bool:
        return order(self.since) <= order(release) and (not self.until or order(release) <= order(self.until))


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
    # Each of these imports beside newer packages than it knows, see methods/engines/transformers_release.py.
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


def _trainer_zero(**entries: Any) -> MapRow:
    """Return the row of Trainer with a configuration of ZeRO stage 2 that has these further entries."""
    config = text_of({"zero_optimization": {"stage": 2, **entries}})  # as the record of a run holds it
    lacks = ("ranks", "buckets", "tokens", *(("copies",) if entries else ()))
    return MapRow("transformers", "hf-trainer", {"config": config}, {"micro_batches": 4}, unseen=lacks)


ZENFLOW_LACKS = ("copies", "streams", "ranks")
LATE = "most gradients are applied some steps late"

# In a row's name, 4 stands for four micro-batches, and `caller` for several backward passes before one step, of which
# the last is marked; `unmarked`: none is.
ROWS = {
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
    "hf-trainer-deepspeed-stage-2-4": _trainer_zero(),
    "hf-trainer-deepspeed-stage-2-offload-4": _trainer_zero(offload_optimizer={"device": "cpu"}),
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

REPORTS = (
    PublicReport(
        ("deepspeedai/DeepSpeed#6550",),
        "offload: gradients of micro-batches are copied over each other",
        until="0.15.1",
        rows=("stage-2-offload-4", "stage-1-offload-4"),
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7967", "deepspeedai/DeepSpeed#6550"),
        "offload: gradients of all micro-batches but the first are dropped",
        since="0.15.2",
        until="0.18.9",
        rows=(
            "stage-2-offload-4",
            "stage-2-offload-4-bf16",
            "stage-2-offload-4-no-clip",
            "stage-2-offload-4-2-ranks",
            "stage-1-offload-4",
        ),
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7981",),
        "offload: of several backward passes before one step only the last counts",
        until="0.18.9",
        rows=("stage-2-offload-4-caller",),
    ),
    PublicReport(
        ("allenai/open-instruct#1498",),
        "several backward passes before one step: each that is not marked begins the sum anew, as if it were the last",
        rows=("stage-2-4-unmarked",),
    ),
    PublicReport(
        (
            "deepspeedai/DeepSpeed#7718",
            "deepspeedai/DeepSpeed#7697",
            "huggingface/trl#4540",
            "huggingface/trl#4631",
            "huggingface/accelerate#3877",
        ),
        "stage 2: the gradient norm is too small, and the loss higher",
        since="0.17.6",
        until="0.18.2",
        rows=("stage-2-4", "stage-2-4-bf16", "stage-2-4-caller", "stage-2-4-overlap-2-ranks"),
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#5692",),
        "the gradient norm is zero",
        since="0.14.3",
        until="0.14.3",
        rows=("stage-3", "stage-3-4"),
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7749",),
        "stage 2: the gradient norm is a fiftieth of that of 0.16.4",
        since="0.18.3",
        until="0.18.3",
        rows=("stage-2", "stage-2-4", "stage-2-4-bf16"),
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7837", "deepspeedai/DeepSpeed#7839"),
        "stage 0 in bf16: the gradient is not set to zero after a step, and divided by a loss scale that it never had",
        since="0.17.6",
        until="0.18.5",
        rows=("stage-0-bf16", "stage-0-4-bf16"),
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#5104", "deepspeedai/DeepSpeed#5151"),
        "the optimizer makes a step without gradients when it is built, so Adam's bias corrections are a step ahead",
        since="0.18.6",  # the reports are older; until this release other faults hide it in stage 0
        rows=("stage-0-bf16", "stage-0-4-bf16"),
    ),
    PublicReport(
        (
            "deepspeedai/DeepSpeed#4298",
            "deepspeedai/DeepSpeed#5294",
            "deepspeedai/DeepSpeed#5523",
            "deepspeedai/DeepSpeed#5606",
        ),
        "stage 2 with overlap_comm: a bucket is filled again before its exchange has ended",
        until="0.14.2",
        rows=("stage-2-4-overlap-2-ranks",),
        needs_gpu=True,
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7188", "deepspeedai/DeepSpeed#7371", "deepspeedai/DeepSpeed#5347"),
        "stage 2 with overlap_comm: the loss becomes 0, for the two buckets are swapped too early",
        until="0.17.4",
        rows=("stage-2-4-overlap-2-ranks",),
        needs_gpu=True,
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7965",),
        "stage 2 with overlap_comm: the loss becomes NaN, for a buffer is freed before its exchange has ended",
        until="0.18.9",
        rows=("stage-2-4-overlap-2-ranks",),
        needs_gpu=True,
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#8061", "deepspeedai/DeepSpeed#8080"),
        "stage 2 with overlap_comm: the exchange waits for one of several streams that fill a bucket",
        until="0.19.2",
        rows=("stage-2-4-overlap-2-ranks",),
        needs_gpu=True,
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7629",),
        "stage 2 on several ranks ends in an error",
        since="0.17.6",
        until="0.18.0",
        rows=("stage-2-4-overlap-2-ranks", "stage-2-offload-4-2-ranks"),
        is_error=True,
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7771",),
        "ZenFlow does not fit the backward pass since 0.18.3",
        since="0.18.3",
        until="0.19.1",
        rows=("zenflow", "zenflow-bf16"),
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7905", "deepspeedai/DeepSpeed#7906", "deepspeedai/DeepSpeed#7925"),
        "SuperOffload ends in an error with several groups of parameters, or on one GPU",
        until="0.18.8",
        rows=("superoffload",),
        is_error=True,
        needs_gpu=True,
    ),
    PublicReport(
        ("axolotl-ai-cloud/axolotl#3058", "pytorch/pytorch#148532", "meta-pytorch/torchtune#1977"),
        "FSDP2 with offload cannot clip gradients unless the process group has a CPU backend, too",
        rows=("fsdp2", "fsdp2-4", "fsdp2-4-2-ranks"),
        is_error=True,
        needs_gpu=True,
    ),
    PublicReport(
        ("NVIDIA/Megatron-LM#1446",),
        "tensor and sequence parallel: ranks have other gradients of the last norm",
        rows=("megatron-4-sequence-parallel-2-ranks",),
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7773", "deepspeedai/DeepSpeed#8152", "deepspeedai/DeepSpeed#8154"),
        "pipelines: gradients of micro-batches are summed, not averaged, or averaged once for each stage",
        why_no_row="no method trains by DeepSpeed's pipelines",
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7292", "deepspeedai/DeepSpeed#7302"),
        "offload: the norm does not count gradients that the caller has set by safe_set_local_grad",
        until="0.16.9",
        why_no_row="no method sets gradients itself",
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#8068",),
        "a configuration that does not name gradient_clipping clips at 1.0, where it did not clip before",
        since="0.19.3",
        why_no_row="each configuration here names it; the row stage-2-no-clip trains with 0, which still turns it off",
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#8010",),
        "offload: moments may be kept in bf16",
        since="0.19.1",
        why_no_row="a setting that trains otherwise by design, and that no row asks for",
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#8207",),
        "stage 3: gradients go to the host by asynchronous copies into page-locked memory",
        since="0.19.5",
        why_no_row="no wrong training is reported; a missing wait would show on a GPU, in the rows stage-3-offload-4"
        " and stage-3-offload-all-4",
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#5242", "deepspeedai/DeepSpeed#7171"),
        "clipping turns an infinite gradient norm into NaN",
        until="0.16.5",
        why_no_row="no row has an infinite gradient",
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#1488",),
        "stages 0 to 3 have other losses with micro-batches",
        why_no_row="it is about release 0.5; the rows stage-0-4 to stage-3-4 train what it describes",
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#7255",),
        "stage 0 tells no gradient norm",
        why_no_row="the training is not wrong; the rows stage-0 and stage-0-4 are judged without norms",
    ),
    PublicReport(
        ("deepspeedai/DeepSpeed#5154",),
        "stage 0 in bf16: ranks sum other gradients than those that are applied",
        until="0.14.0",
        why_no_row="it needs several ranks at stage 0; the rows stage-0-bf16 and stage-0-4-bf16 have one",
    ),
    PublicReport(
        ("modelscope/ms-swift#6815", "modelscope/ms-swift#8341"),
        "stage 0: the trainer logs the gradient norm of one rank",
        why_no_row="the number is the trainer's, not DeepSpeed's",
    ),
    PublicReport(
        ("pytorch/pytorch#100180",),
        "FSDP1 with offload cannot sum gradients outside of no_sync()",
        why_no_row="no method trains by FSDP1",
    ),
    PublicReport(
        ("pytorch/pytorch#160291",),
        "FSDP2 on replicas with offload: gradients become NaN, for the host waits for the wrong stream",
        why_no_row="no method replicates shards, and a CPU has no streams",
    ),
    PublicReport(
        ("huggingface/transformers#35438", "huggingface/blog#2414"),
        "the mean loss of micro-batches counts each micro-batch alike, not each token",
        until="4.45.2",
        rows=("hf-trainer-4", "hf-trainer-4-bf16"),
    ),
    PublicReport(
        ("huggingface/transformers#46204",),
        "the mean loss counts a token too many for each sample, whose first token no loss has: loss and gradients are"
        " too small",
        since="4.46.3",
        until="5.9.0",
        rows=(
            "hf-trainer-4",
            "hf-trainer",
            "hf-trainer-4-bf16",
            "hf-trainer-deepspeed-stage-2-4",
            "hf-trainer-deepspeed-stage-2-offload-4",
        ),
    ),
    PublicReport(
        ("huggingface/transformers#45305",),
        "Trainer with DeepSpeed sums the gradients of micro-batches, and does not average them",
        why_no_row="it was seen with DeepSpeed 0.18.9; the rows hf-trainer-deepspeed-stage-2-4 and"
        " hf-trainer-deepspeed-stage-2-offload-4 train with the installed one",
    ),
    PublicReport(
        ("NVIDIA/Megatron-LM#2417", "NVIDIA/Megatron-LM#3159", "NVIDIA/Megatron-LM#1532"),
        "the gradient of multi-token prediction is scaled by the wrong number of tokens",
        why_no_row="the model has no multi-token prediction",
    ),
    PublicReport(
        ("NVIDIA/Megatron-LM#673", "NVIDIA/Megatron-LM#1464"),
        "context parallel: the loss is scaled, or the gradient of attention computed, wrongly",
        why_no_row="no method is context parallel",
    ),
    PublicReport(
        ("NVIDIA/Megatron-LM#7452",),
        "several wrong gradients where kinds of parallelism meet experts, multi-token prediction or linear attention",
        why_no_row="the model has none of these layers",
    ),
)


def reports_about(row: str, release: str) -> list[PublicReport]:
    return [report for report in REPORTS if row in report.rows and report.is_about(release)]


def columns_of(name: str) -> list[str]:
    """Return the releases of a row, oldest first. A method without OPTION runs the installed one only."""
    row, engine = ROWS[name], ENGINES[ROWS[name].engine]
    releases = engine.columns
    if OPTION not in method.option_names(method.load(row.method)):
        releases = [release for release in releases if release == engine.installed]
    return [release for release in releases if order(row.since) <= order(release)]


@dataclass(frozen=True)
class Choice:
    """What a call asks for. Empty: no restriction."""

    engine: str | None = None
    names: Sequence[str] = ()  # of rows
    since: str = ""
    until: str = ""
    releases: Sequence[str] = ()  # these alone, also such as the table lacks
    # only releases beside the first and the last one of a public report, in its first row
    is_quick: bool = False
    has_gpu: bool = False  # False: is_quick leaves out reports that a CPU cannot show

    def includes(self, name: str, release: str) -> bool:
        """True if the release is one of the row's, and in the asked span."""
        first = max(order(self.since), order(ROWS[name].since))
        return first <= order(release) and (not self.until or order(release) <= order(self.until))


def chosen(asked: Choice) -> list[tuple[str, str]]:
    """Return the cells that a call asks for, each as the name of its row and its release. Raises ValueError for an
    unknown engine, row or version, and for releases where several engines are asked for."""
    engine, names = asked.engine, asked.names
    for wanted, known, what in (
        ([engine] if engine else [], ENGINES, "an engine"),
        (names, ROWS, "a setting"),
    ):
        if unknown := [name for name in wanted if name not in known]:
            raise ValueError(f"expected {what} of {', '.join(known)}, got {unknown[0]!r}")
    rows = [
        name for name, row in ROWS.items() if engine in (None, row.engine) and (not names or name in names)
    ]
    engines = list(dict.fromkeys(ROWS[name].engine for name in rows))
    if not rows:
        raise ValueError(f"expected a setting of {engine}, got {', '.join(names)}; leave --only out")
    if (asked.since or asked.until or asked.releases) and len(engines) > 1:
        raise ValueError(
            f"expected releases of one engine, got {', '.join(engines)}; try --only {engines[0]}"
        )
    for version in filter(None, (*asked.releases, asked.since, asked.until)):
        Release(ENGINES[engines[0]].package, version)  # raises ValueError if it is none
    cells = [(name, release) for name in rows for release in (asked.releases or columns_of(name))]
    quick = _beside_reports(asked.has_gpu)
    return [cell for cell in cells if asked.includes(*cell) and (not asked.is_quick or cell in quick)]


def _beside_reports(has_gpu: bool) -> set[tuple[str, str]]:
    """Return the cells at both ends of each report, in the first of its rows: the last release before it, its first
    and its last release, and the first release after it."""
    cells = set()
    for report in REPORTS:
        for name in report.rows[:1] if has_gpu or not report.needs_gpu else ():
            columns = columns_of(name)
            for earlier, later in itertools.pairwise(columns):
                if report.is_about(earlier) != report.is_about(later):
                    cells |= {(name, earlier), (name, later)}
    return cells
