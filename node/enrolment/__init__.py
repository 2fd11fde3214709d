"""How a peer becomes a member: the run's authority, tokens, the enrolment rpc."""
