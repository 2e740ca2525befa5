"""Bugs to plant in methods/pipeline/, each of which a pipeline's exactness must show."""

from __future__ import annotations

from typing import NamedTuple


class PipelineBug(NamedTuple):
    """One change to a file."""

    symptom: str
    file: str
    old: str
    new: str


GRADIENTS, USER = "methods/pipeline/gradients.py", "methods/pipeline/pipeline.py"
BUGS = [
    PipelineBug(
        "tied_gradient_not_summed",
        GRADIENTS,
        "all_reduce(own_master.grad, self.groups.pairs[pair])",
        "pass",
    ),
    PipelineBug(
        "norm_counts_the_tied_gradient_twice",
        GRADIENTS,
        "torch.linalg.vector_norm(norms_and_numbers[: self.num_names])",
        "torch.linalg.vector_norm(torch.cat([norms_and_numbers[:1], norms_and_numbers[: self.num_names]]))",
    ),
    PipelineBug(
        "gradient_of_a_replica_dropped",
        GRADIENTS,
        "for bucket in _yield_buckets([*grads, numbers]):",
        "for bucket in _yield_buckets([*[grad.mul_(not self.groups.replica) for grad in grads], numbers]):",
    ),
    PipelineBug(
        "overflow_of_a_sum_in_fp16_not_counted",
        GRADIENTS,
        "if self.dtype != torch.float16",
        "if True",
    ),
    PipelineBug(
        "one_rank_steps_through_an_overflow",
        USER,
        "overflow = self.scale.overflows(norm)",
        "overflow = self.scale.overflows(norm) and self.rank != 1",
    ),
    PipelineBug(
        "short_last_micro_batch_weighs_as_the_others",
        USER,
        "self.micro_batch_sizes[micro_batch] / self.batch_size",
        "1 / len(self.micro_batch_sizes) / self.rank_map.num_replicas",
    ),
    PipelineBug(
        "random_state_of_the_recompute_not_restored",
        "methods/pipeline/engine.py",
        "with self._random_state_of(random_states):",
        "if True:",
    ),
]
BY_NAME = {bug.symptom: bug for bug in BUGS}
