"""The device of the tests that are marked ``gpu``."""

import os
from typing import Final

DEVICE: Final = os.environ.get("HETERORL_TEST_DEVICE", "cuda")
"""Another GPU where named; ``cpu`` tries the tests themselves, on a machine without one."""
