"""Values that travel between peers or rest in a ledger, and what bounds them; no I/O."""
