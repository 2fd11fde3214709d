"""What every test process starts with."""

import os

# Before torch is imported, and inherited by the processes that tests start. The models are tiny and pytest
# runs a worker a core: more threads wait for each other (tests/unit/learner on two
# cores: 64 s, with one thread each 20 s).
os.environ.setdefault("OMP_NUM_THREADS", "1")
