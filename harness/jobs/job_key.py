"""The facts of a job's key beside the job itself: the method's code, the files that the job reads, and this machine.

A record answers a job only if both have the same key (docs/records.md, What makes two runs the same).
"""

from __future__ import annotations

from pathlib import Path

from harness.core import method
from harness.core.job import Job, Workload
from harness.devices import machine
from harness.models import weight_files


def files_read_by(job: Job) -> tuple[Workload, int] | None:
    """Return the workload and the number of samples of a job that reads a corpus or weights from files; else None."""
    load = job.workload
    return None if load.corpus is load.weights is None else (load, job.steps * load.batch_size)


def method_identity(job: Job, folders: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return the facts that a job's key contains because of its method's options, such as the hash of an archive."""
    return method.create(job.method, job.options, folders).identity()


def method_context(
    method_name: str, files: tuple[Workload, int] | None, folders: tuple[Path, ...] = ()
) -> dict[str, str]:
    """Return the facts on which a measurement depends beside its job, so that a changed file changes the job's key. The
    facts are a hash of the method's source, hashes of the files that the job reads, and facts of this machine. `files`:
    what files_read_by() returns for the job."""
    facts = {"source": method.source_hash(method_name, folders), "corpus": "", **machine.compared_facts()}
    load, num_samples = files or (None, 0)
    if load and load.corpus is not None:
        from harness.core.data import corpus_hash

        facts["corpus"] = corpus_hash(load, num_samples)
    if load and load.weights is not None:
        facts["weights"] = weight_files.files_hash(load.weights)
    return facts
