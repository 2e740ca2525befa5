"""Public reports of wrong trainings by releases of engines. Each names the rows of case 10's map that should show it,
or the reason why there is no such row."""

from __future__ import annotations

from dataclasses import dataclass

from cases._releases import order


@dataclass(frozen=True)
class PublicReport:
    """A public report of a wrong training. `threads`: its discussions, as OWNER/REPOSITORY#NUMBER."""

    threads: tuple[str, ...]
    says: str
    since: str = ""  # first release that it is about; empty: the table's first one, too
    until: str = ""  # last release that it is about; empty: no release is known to be right
    rows: tuple[str, ...] = ()  # keys of SETTING_ROWS that should show it
    is_error: bool = False  # True: training ends in an error; False: it is wrong
    needs_gpu: bool = False  # True: a CPU cannot show it
    why_no_row: str = ""

    @property
    def links(self) -> str:
        """Return the threads as links in Markdown."""
        links = []
        for thread in self.threads:
            repository, _, number = thread.partition("#")
            address = f"https://github.com/{repository}/issues/{number}"
            links.append(f"[{repository.rpartition('/')[2]} {number}]({address})")
        return ", ".join(links)

    def is_about(self, release: str) -> bool:
        return order(self.since) <= order(release) and (not self.until or order(release) <= order(self.until))


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
