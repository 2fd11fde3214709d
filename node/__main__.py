"""``python -m node`` is ``heterorl-node``."""

import sys

from node.commands.cli import main

sys.exit(main())
