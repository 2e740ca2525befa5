"""What forks begin with. The garbage collector does not search it, neither now nor in a fork, which would copy it."""

import gc
import importlib

from harness.base import fork_server
from harness.base.foreign_file import _adapter
from harness.core.record import Record

gc.disable()
for name in (
    *fork_server.IMPORTS,
    "tests.support.on_sim",
    "tests.support.preloaded_models",
    "harness.gate.inspect_training",
    "harness.run.worker",
):
    importlib.import_module(name)
_adapter(Record)
gc.freeze()
gc.enable()
