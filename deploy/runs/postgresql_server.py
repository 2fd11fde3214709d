"""A PostgreSQL server of Debian's in a temporary directory, for tests and laboratories."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from deploy.needs import postgresql_programs

_USER = "postgres"
"""The database's superuser, and the account that the server runs as where we are root, which it refuses."""


@dataclass(frozen=True, slots=True)
class PostgresqlServer:
    sockets: Path

    def url(self, database: str) -> str:
        return f"postgresql://{_USER}@/{database}?host={quote(str(self.sockets), safe='')}"

    def create(self, database: str) -> str:
        """Create an empty database; return its address."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(database)))
        return self.url(database)


@contextmanager
def postgresql_server(*, is_durable: bool) -> Iterator[PostgresqlServer]:
    """Run a server on a socket of its own while the body runs.

    Args:
        is_durable: False spares the disk, where no test cuts the power.
    """
    programs = postgresql_programs()
    assert programs is not None, "deploy/needs.py names it"
    identity: dict[str, Any] = {}
    directory = Path(tempfile.mkdtemp(prefix="heterorl-postgresql-"))
    if os.geteuid() == 0:
        account = pwd.getpwnam(_USER)
        identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        os.chown(directory, account.pw_uid, account.pw_gid)
    data, log = directory / "data", directory / "log"
    try:
        subprocess.run(
            [programs / "initdb", "--auth=trust", "--no-sync", "-U", _USER, "-D", data, "--encoding=UTF8"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=directory,
            **identity,
        )
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(directory),
            "fsync": "on" if is_durable else "off",
            "shared_buffers": "16MB",
        }
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        control: list[str | Path] = [programs / "pg_ctl", "-D", data, "-l", log, "-w"]
        subprocess.run(
            [*control, "-o", options, "start"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=directory,
            **identity,
        )
        try:
            yield PostgresqlServer(directory)
        finally:
            subprocess.run(
                [*control, "-m", "immediate", "stop"],
                check=True,
                stdout=subprocess.DEVNULL,
                cwd=directory,
                **identity,
            )
    finally:
        shutil.rmtree(directory)
