"""What forks begin with, without a search of it by the garbage collector: neither now nor in a fork, which would copy it.
"""

import gc
import importlib

from harness.run import warm_start

gc.disable()
for name in (*warm_start.PRELOADED, "tests.support.on_sim", "harness.run.inspect_training", "harness.run.worker"):
    importlib.import_module(name)
gc.freeze()
gc.enable()
