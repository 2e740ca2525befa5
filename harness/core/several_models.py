"""Jobs that train several models by turns: Hydra's grid of learning rates and batch sizes."""

from __future__ import annotations

import dataclasses

from harness.core.job import Job, Workload

# Options of methods that train several models: the number of models and the number of batch sizes.
OF_SEVERAL_MODELS = ("num_models", "num_batch_sizes")
# most learning rates among several models: the first is the workload's, each next is half as high
NUM_RATES = 6


def workloads_of(job: Job) -> list[Workload]:
    """Return the workload of each of the job's models: one model, unless options of OF_SEVERAL_MODELS say more."""
    return several(job.workload, *(job.options.get(name, 1) for name in OF_SEVERAL_MODELS))


def several(workload: Workload, num_models: int, num_batch_sizes: int) -> list[Workload]:
    """Return the workloads of several models, each with its own pair of learning rate and batch size. There are
    `num_batch_sizes` sizes and NUM_RATES rates, each half of the one before; after the last rate the rates repeat."""
    workloads = []
    for number in range(num_models):
        rate, size = divmod(number, num_batch_sizes)
        learning_rate = workload.learning_rate / 2 ** (rate % NUM_RATES)
        batch_size = workload.batch_size >> size
        workloads.append(dataclasses.replace(workload, learning_rate=learning_rate, batch_size=batch_size))
    return workloads
