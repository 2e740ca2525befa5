"""Shows which methods train which families of models: python -m bench.families [--results DIR] [--out FILE].

For each family, every method that accepts a config.json trains a model of 4 layers, hidden size 64, in fp32 at learning
rates up to 3e-3. The table shows the gate's verdicts. A repeated call runs only the jobs that have no result yet.
"""

from __future__ import annotations

from typing import Any

from bench import verdict_table
from bench.ranks import LAST_RATE, STEPS
from harness.base.console import print_table
from harness.core import hub_config, method
from harness.core.job import LR_WARMUP_STEPS, Job, Workload
from harness.core.record import Record
from harness.forecast.fit import resolve

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False}, "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": False}, "mistral": {"head_dim": 16, "sliding_window": 64},
    "phi3": {}, "olmo2": {}, "smollm3": {}, "granite": {}, "gpt_neox": {},
}  # fmt: skip
# Options of additional jobs; each method also runs with its default options.
MORE: dict[str, list[dict[str, Any]]] = {
    "stronghold": [{"placement": "R1W2S1", "window_size": 2}],
    "varuna": [{"world_size": 2, "num_stages": 2}],
    "fsdp2-offload": [{"world_size": 2}],
}


def workload_of(family: str) -> Workload:
    config = {"model_type": family, **SIZES, **FAMILIES[family]}
    sizes = {**hub_config.sizes_of(config), "seq_len": 32, "batch_size": 4}
    rate = LAST_RATE * LR_WARMUP_STEPS / STEPS
    return Workload(**sizes, model=family, config=hub_config.text_of(config), learning_rate=rate)


def asked() -> list[tuple[str, dict[str, Any]]]:
    """Return pairs of method and options: every method but the reference that accepts a config.json, with its default
    options and with those of MORE.
    """
    able = [name for name, cls in method.loadable(()).items() if cls.takes_config and not cls.is_reference]
    return [(name, options) for name in able for options in ({}, *MORE.get(name, []))]


def verdict(record: Record) -> str:
    if record.status != "ok":
        return record.status
    return "exact" if record.gate.verdict == "exact" else f"{record.gate.verdict}, {_difference(record)}"


def _difference(record: Record) -> str:
    found = record.gate.evidence.get("loss_difference")
    return "-" if found is None else f"{found:.1e}"


def main() -> None:
    given, columns, found = verdict_table.arguments(__doc__ or ""), asked(), list[tuple[str, ...]]()
    with verdict_table.sweeping(given.results) as sweep:
        for family in FAMILIES:
            workload = workload_of(family)
            jobs = [Job(name, workload, options, device="cpu", steps=STEPS, warmup=2) for name, options in columns]
            found.append((family, *map(verdict, sweep.run([resolve(job)[0] for job in jobs]))))
    texts = [" ".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in columns]
    rows = [(text, *(row[number] for row in found)) for number, text in enumerate(texts, start=1)]
    heads = ("method", *FAMILIES)
    print_table(heads, rows, has_lines=True)
    title = "Families by their config.json: the gate's verdicts, fp32, largest difference of a loss of 10 steps"
    verdict_table.write(given.out, title, "python -m bench.families", heads, rows)


if __name__ == "__main__":
    main()
