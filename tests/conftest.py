"""What every test process starts with."""

import os

# Before torch is imported, and inherited by the processes that tests start. The models are tiny and pytest
# runs a worker a core: more threads wait for each other. It is 64 s against 20 s for tests/unit/learner on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
