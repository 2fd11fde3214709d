"""The command line: ``heterorl-node`` and its subcommands."""
