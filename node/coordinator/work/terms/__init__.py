"""Terms: what the run asks for, and whether a peer or a group meets it."""
