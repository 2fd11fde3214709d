"""Nodes that were let into a run, without a coordinator."""

import contextlib
import time
from pathlib import Path

from node.enrolment.authority import Authority
from node.enrolment.enrolment_ledger import FILE_NAME, EnrolmentLedger
from node.enrolment.init_run import AUTHORITY_DIRECTORY
from node.enrolment.tokens import Token, issue_token
from node.values.roles import Role


def let_in(run_dir: Path, node: str, *, role: Role = Role.SAMPLER) -> None:
    """Enrol a node, as the coordinator does."""
    state = run_dir / Role.COORDINATOR
    authority = Authority.load(state / AUTHORITY_DIRECTORY)
    token = Token.parse(issue_token(authority, role=role, node_id=node, address="h:1", now=time.time()))
    with contextlib.closing(EnrolmentLedger(state / FILE_NAME)) as ledger:
        ledger.spend(token, node_id=node, key_digest=b"k", now=time.time())
