"""Short logs in the published artifact's dialects, with numbers of our own or with the published runs' losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from harness.core.job import Job, Workload
from harness.core.log_lines import end_line, header_lines, interval_lines
from harness.core.record import Record
from papers.logs.import_logs import import_logs
from papers.logs.parse import read_log
from papers.logs.to_record import to_record

PUBLISHED = ROOT.parent / "shared" / "published"
needs_published = pytest.mark.skipif(
    not PUBLISHED.exists(), reason="the published raw logs are not in ../shared"
)

# Of each published run, by "method layers window": the loss at iterations 10 to 50, from its log.
CURVES = {
    "megatron-lm 32 4": [10.9056, 9.6886, 9.1697, 8.9413, 8.7807],
    "l2l 32 4": [11.2093, 11.2072, 11.1973, 11.2155, 11.2112],
    "l2l 78 4": [11.2641],
    "zero-offload 32 4": [10.9191, 9.6972, 9.1710, 8.9407, 8.7797],
    "zero-offload 48 4": [10.8241, 9.5064, 9.0637, 8.8859, 8.7581],
    "zero-infinity 32 4": [11.1425, 10.3767, 9.6539, 9.3056, 9.0471],
    "zero-infinity 48 4": [11.2653, 11.2203, 11.0817, 10.8706, 10.5842],
    "stronghold 16 15": [11.3105, 11.2765, 11.1423, math.nan, math.nan],
    "stronghold 24 15": [10.6224, 10.1192, 10.0476, 9.5206, 9.4804],
    "stronghold 32 2": [10.6659, 10.9749, 10.6872, 10.6364, 10.6907],
    "stronghold 32 4": [10.3913, 9.9650, 9.4305, 9.8653, 9.6254],
    "stronghold 32 6": [10.6096, 10.0303, 10.1898, 10.3800, 10.0495],
    "stronghold 32 8": [10.8272, 10.5590, 9.8872, 10.0773, 9.8806],
    "stronghold 32 10": [10.6984, 10.7563, 10.5273, 10.6089, 10.3901],
    "stronghold 32 12": [10.8081, 10.4786, 10.3956, 10.3910, 10.1473],
    "stronghold 32 14": [10.9256, 10.6990, 10.4501, 10.2274, 9.9659],
    "stronghold 32 15": [11.0668, 10.9105, 10.7684, 10.3747, 10.2419],
    "stronghold 40 15": [10.9080, 10.0474, 10.0616, 9.7973, 9.4705],
    "stronghold 48 15": [10.8280, 10.5872, 10.5113, 10.1000, 9.7598],
    "stronghold 56 15": [10.6648, 9.9218, 9.8026, 9.9642, 9.9793],
    "stronghold 64 15": [10.7208, 10.3495, 10.5470, 10.3521, 10.1454],
    "stronghold 78 15": [10.6630, 10.5429, 10.2312, 10.0273, 9.9639],
    "stronghold 92 15": [10.6554, 10.1776, 10.0634, 9.9719, 9.7956],
    "stronghold 100 4": [9.9489, 9.1899, 9.3239, 9.2730, 8.8296],
}


def name_of(method: str, num_layers: int, hidden_size: int, window: int = 4) -> str:
    return f"log_{method}_l-{num_layers}_hs-{hidden_size}_bs-4_ws-{window}_2022-07-02.1656730240.txt"


def imported(*logs: Path, results: Path, reference: str | None = None) -> list[Record]:
    skipped: list = []
    records = [
        record for record, _ in import_logs(logs, results, reference, lambda *each: skipped.append(each))
    ]
    assert not skipped
    return records


def one(folder: Path, name: str, lines: list[str]) -> Record:
    """The record of these lines, not judged."""
    return to_record(read_log(write_log(folder, name, lines)), name)


def write_log(folder: Path, name: str, lines: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


def write_published(folder: Path, name: str) -> Path:
    """A log in its method's dialect, with a published run's losses and times of our own."""
    method, num_layers, window = name.split()
    losses, of = CURVES[name], 50
    dialect = deepspeed_lines if method.startswith("zero-") else megatron_lines
    lines = dialect(int(num_layers), 2048, losses, of=of)
    if len(losses) < 5:
        lines.append("run.sh: line 56: 31047 Killed                  python pretrain.py")
    return write_log(folder, name_of(method, int(num_layers), 2048, int(window)), lines)


def megatron_lines(
    num_layers: int,
    hidden_size: int,
    losses: Sequence[float],
    milliseconds: Sequence[float] | None = None,
    norms: Sequence[float] | None = None,
    of: int | None = None,
    heads: int = 16,
    dropout: float = 0.1,
    data: str = "/data/corpus",
) -> list[str]:
    """As Megatron-LM prints: the published baseline, STRONGHOLD (more timers), L2L (no norms)."""
    load = Workload(num_layers=num_layers, hidden_size=hidden_size, num_heads=heads)
    lines = [
        "using torch.float32 for parameters ...",
        *_arguments(load, of or 10 * len(losses), dropout, data, "micro_batch_size"),
        " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)",
        f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {load.num_params}",
        "time (ms) | model-and-optimizer-setup: 137.60 | train/valid/test-data-iterators-setup: 337.08",
    ]
    for index, loss in enumerate(losses):
        elapsed = milliseconds[index] if milliseconds else 500.0
        shown = f" lm loss: {loss:.6E} |" if math.isfinite(loss) else ""
        norm = f" grad norm: {norms[index]:.3f} |" if norms else ""
        flops = 8 * load.num_params * 4096 / (elapsed / 1000) / 1e12
        lines += [
            f" iteration {10 * (index + 1):8d}/{of or 10 * len(losses):8d} | elapsed time per iteration (ms):"
            f" {elapsed:.1f} | learning rate: 4.687E-07 | global batch size:     4 |{shown} loss scale: 1.0 |{norm}"
            " number of skipped iterations:   0 | number of nan iterations:   0 |",
            f"Effective Tera Flops per GPU: {flops:.2f} and total parameters {load.num_params / 1e9:.3f} B",
            f"NumWorkers: 1; SamplesPerStep: 4; IterationTime: {elapsed / 1000};"
            f"  SamplesPerSecond: {4 / (elapsed / 1000)}",
            "time (ms) | forward-compute: 100.00 | backward-compute: 300.00 | optimizer: 2.44",
        ]
        if index == 0:
            lines.append(f"[Rank 0] (after 10 iterations) {MEMORY}")
    return lines


def deepspeed_lines(
    num_layers: int, hidden_size: int, losses: Sequence[float], of: int | None = None
) -> list[str]:
    """As DeepSpeed's Megatron 1.1.5 prints: ZeRO-Offload and ZeRO-Infinity."""
    load, steps = Workload(num_layers=num_layers, hidden_size=hidden_size), of or 10 * len(losses)
    lines = [
        *_arguments(load, steps, 0.1, "/data/corpus", "batch_size"),
        " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)",
        f" > number of parameters on model parallel rank 0            {load.num_params / 1e9:.3f} Billion",
    ]
    for index, loss in enumerate(losses):
        step, flops = 10 * (index + 1), 8 * load.num_params * 4096 / 5.0 / 1e12
        lines += [
            "[2022-07-02 03:17:57,221] [INFO] [logging.py:69:log_dist] [Rank 0] rank=0 time (ms) | optimizer_step: 7.1",
            f"[2022-07-02 03:17:57,221] [INFO] [timer.py:181:stop] 0/{step}, SamplesPerSec={8.0 + index / 100}",
            f" iteration {step:8d}/{steps:8d} | elapsed time per iteration (ms): 500.0 | learning rate: 4.687E-07 |"
            + (f" lm loss: {loss:.6E} |" if math.isfinite(loss) else "")
            + " number of skipped iterations:   0 | number of nan iterations:   0 |",
            "time (ms) | forward: 100.00 | backward: 300.00 | batch generator: 1.22",
            f"Effective Tera Flops per GPU: {flops:.2f} and total parameters {load.num_params / 1e9:.3f} B",
        ]
        if index == 0:
            lines.append(f"after 10 iterations {MEMORY}")
    return lines


def own_lines(num_layers: int, hidden_size: int, losses: Sequence[float], of: int | None = None) -> list[str]:
    """As this harness prints: a run that stopped early was interrupted."""
    steps = of or 10 * len(losses)
    job = Job("l2l", Workload(num_layers=num_layers, hidden_size=hidden_size), steps=steps)
    done = {"losses": [loss for loss in losses for _ in range(10)], "grad_norms": [], "loss_scales": []}
    done |= {"step_seconds": [0.5] * len(done["losses"]), "skipped_steps": []}
    lines = header_lines(job)
    for step in range(10, len(done["losses"]) + 1, 10):
        lines += interval_lines(job, {name: values[:step] for name, values in done.items()}, {})
    how = (
        ("ok", "done") if len(done["losses"]) == steps else ("interrupted", f"step {len(done['losses']) + 1}")
    )
    return [*lines, end_line(job, *how, len(done["losses"]), "")]


def prefixed(lines: list[str]) -> list[str]:
    return [f"[2024-01-02 03:04:05.678] worker-0: {text}" for text in lines]


def newer(lines: list[str]) -> list[str]:
    """Megatron-LM since 2024: a time in brackets before the iteration, other fields, no speed line, no arguments."""
    kept = [text for text in lines if text.startswith(" iteration") or "number of parameters" in text]
    return [_as_of_2024(text) if text.startswith(" iteration") else text for text in kept]


def _as_of_2024(text: str) -> str:
    samples = 4 * int(text.split()[1].rstrip("/"))
    more = f" consumed samples: {samples:12d} | elapsed time per iteration (ms):"
    text = text.replace(" elapsed time per iteration (ms):", more)
    text = text.replace(" learning rate", " throughput per GPU (TFLOP/s/GPU): 1.5 | learning rate")
    return " [2024-01-02 03:04:05]" + text.replace(
        " loss scale", " num zeros: 0 | params norm: 7.125 | loss scale"
    )


def steps_of(
    size: int | Sequence[int] | None = 16,
    time: str = "elapsed time per iteration (ms): 1000.0",
    before: str = " [2024-03-30 12:00:00.250]",
    arguments: dict[str, object] | None = None,
) -> list[str]:
    """Twenty lines of steps of a 4-layer model of 256, each printed, as Megatron prints them since 2024.

    `size`: the global batch of all steps or of each; None: no line tells it. `time`: the field of the step's time.
    """
    stated: dict[str, object] = {
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "seq_length": 128,
        "micro_batch_size": 4,
        "params_dtype": "torch.bfloat16",
        "train_iters": 20,
        "log_interval": 1,
        "clip_grad": 1.0,
    }
    lines = [
        f"  {name} {'.' * (48 - len(name))} {value}" for name, value in (stated | (arguments or {})).items()
    ]
    sizes = list(size) if isinstance(size, Sequence) else [size] * 20
    for step in range(1, 21):
        samples = sum(sizes[:step]) if size else None
        lines.append(
            f"{before} iteration {step:8d}/{20:8d} |{f' consumed samples: {samples:12d} |' if samples else ''} {time} |"
            f" learning rate: 2.000000E-06 |{f' global batch size: {sizes[step - 1]:5d} |' if samples else ''}"
            f" lm loss: {10.8 - 0.05 * step:.6E} | loss scale: 1.0 | grad norm: 1.010 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    return lines


SMALL_NAME = "log_megatron-lm_l-4_hs-256_bs-4_ws-4_2024-03-30.1711828800.txt"  # of steps_of()


def two_ranks(lines: list[str]) -> list[str]:
    return [each for text in lines for each in ((text, text) if "iteration" in text else (text,))]


def colored(lines: list[str]) -> list[str]:
    return ["\x1b[32m" + text + "\x1b[0m" for text in lines]


def of_windows(lines: list[str]) -> list[str]:
    return ["\ufeff" + lines[0] + "\r", *(text + "\r" for text in lines[1:])]


VARIANTS = (prefixed, newer, two_ranks, colored, of_windows)  # of a dialect, that no published log shows
MEMORY = "memory (MB) | allocated: 100.0 | max allocated: 120.0 | reserved: 150.0 | max reserved: 200.0"


def _arguments(load: Workload, steps: int, dropout: float, data: str, batch: str) -> list[str]:
    told = {
        batch: 4,
        "clip_grad": 1.0,
        "data_path": f"['{data}']",
        "hidden_dropout": dropout,
        "hidden_size": load.hidden_size,
        "log_interval": 10,
        "lr": 0.00015,
        "num_attention_heads": load.num_heads,
        "num_layers": load.num_layers,
        "params_dtype": "torch.float32",
        "seed": 1234,
        "seq_length": 1024,
        "train_iters": steps,
    }
    head = "-------------------- arguments --------------------"
    return [head, *(f"  {name} {'.' * (40 - len(name))} {value}" for name, value in told.items())]
