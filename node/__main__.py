"""``python -m node`` is ``heterorl-node``."""

import sys

from node.cli import main

sys.exit(main())
