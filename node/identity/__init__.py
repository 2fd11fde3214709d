"""Who a peer is: the authority of a run, enrolment, certificates, signatures."""
