"""Every peer's half of MembershipService: it joins, sends heartbeats, joins again."""
