"""The Job that makes a run in a cluster leaves what the pods mount, against an API server of this process."""

import base64
import datetime
import io
import ipaddress
import json
import runpy
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deploy.check import DEPLOY
from node.commands import cli
from node.enrolment.enrolment_ledger import FILE_NAME as LEDGER_FILE
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.init_run import IDENTITY_DIRECTORY
from node.enrolment.tokens import Token
from node.identity.identity_store import load_identity
from node.values.roles import Role

BOOTSTRAP: Final = DEPLOY / "k8s/bootstrap"
PREFIX: Final = "/api/v1/namespaces/runs/"


def allowed() -> set[tuple[str, str, str]]:
    """Return what the Job's Role permits: verb, resource and name ("": any)."""
    documents = list(yaml.safe_load_all((BOOTSTRAP / "bootstrap.yaml").read_text()))
    (role,) = (document for document in documents if document["kind"] == "Role")
    return {
        (verb, resource, name)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


class Cluster(ThreadingHTTPServer):
    """Secrets and config maps by name, as far as the Job's Role lets its requests through."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.allowed = allowed()


class Requests(BaseHTTPRequestHandler):
    server: Cluster

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def answer(self, verb: str) -> None:
        kind, _, name = self.path.removeprefix(PREFIX).partition("/")
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        place = kind, name or body["metadata"]["name"]
        if self.headers["Authorization"] != "Bearer of the Job":
            status = 401
        elif (verb, kind, name) not in self.server.allowed:
            status = 403
        elif verb == "get":
            status = 200 if place in self.server.objects else 404
        elif verb == "create" and place in self.server.objects:
            status = 409
        else:
            self.server.objects[place] = body
            status = 201
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.answer("get")

    def do_POST(self) -> None:
        self.answer("create")

    def do_PUT(self) -> None:
        self.answer("update")


@contextmanager
def cluster(account: Path) -> Iterator[Cluster]:
    """Serve the API over TLS, with the files that a pod gets to reach it in ``account``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    account.mkdir()
    (account / "token").write_text("of the Job")
    (account / "ca.crt").write_bytes(pem)
    (account / "server.pem").write_bytes(
        pem
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "server.pem")
    with Cluster() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


def node_command(command: list[str], **_: object) -> "subprocess.CompletedProcess[bytes]":
    """Run ``heterorl-node`` in this process."""
    with redirect_stdout(io.StringIO()) as printed:
        assert cli.main(command[1:]) == 0
    return subprocess.CompletedProcess(command, 0, printed.getvalue().encode())


def run_job(server: Cluster, account: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the Job's script and the commands that it calls; return what it printed."""
    environ = {
        "SERVICE_ACCOUNT": str(account),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.server_port),
        "NAMESPACE": "runs",
        "HUB_HOSTS": "heterorl-hub,hub.example.org",
        "TOKEN_USES": "100",
    }
    with monkeypatch.context() as patched, redirect_stdout(io.StringIO()) as printed:
        for name, value in environ.items():
            patched.setenv(name, value)
        patched.setattr(subprocess, "run", node_command)
        runpy.run_path(str(BOOTSTRAP / "bootstrap.py"), run_name="__main__")
    return printed.getvalue()


def content(server: Cluster, secret: str) -> dict[str, bytes]:
    data = server.objects["secrets", secret]["data"]
    return {name: base64.b64decode(value) for name, value in data.items()}


def test_the_job_makes_identities_and_tokens_that_the_hub_knows_and_does_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, state = tmp_path / "account", tmp_path / "state"
    with cluster(account) as server:
        # As an attempt that was cut off leaves it.
        server.objects["secrets", "heterorl-hub-seed"] = {"metadata": {"name": "heterorl-hub-seed"}}
        assert "the run is made" in run_job(server, account, monkeypatch)
        made = dict(server.objects)
        assert run_job(server, account, monkeypatch) == "the run is there\n"
        assert server.objects == made
    for secret in ("heterorl-hub-seed", "heterorl-learner-seed"):
        # As the pods do; Python's own has no filter before 3.11.4, and asks for one after 3.11.
        state.mkdir(exist_ok=True)
        unpack = ("tar", "--extract", "--preserve-permissions", "--directory", str(state))
        subprocess.run(unpack, input=content(server, secret)["state.tar"], check=True)
    for role in (Role.COORDINATOR, Role.LEARNER):
        assert load_identity(state / role / IDENTITY_DIRECTORY) is not None
    run = json.loads(made["configmaps", "heterorl-run"]["data"]["run.json"])
    tokens = {
        role: Token.parse(text.decode().strip()) for role, text in content(server, "heterorl-tokens").items()
    }
    assert {token.role for token in tokens.values()} == {
        Role.SAMPLER,
        Role.RELAY,
        Role.VERIFIER,
        Role.CONTRIBUTOR,
    }
    with closing(EnrolmentLedger(state / Role.COORDINATOR / LEDGER_FILE)) as ledger:
        assert {one.number for one in ledger.issued()} == {token.number for token in tokens.values()}
    for name, token in tokens.items():
        assert (token.role, token.uses, token.address) == (Role(name), 100, "heterorl-hub:7701")
        assert token.run_id == run["run_id"]


@pytest.mark.parametrize("role", ["sampler", "relay", "verifier", "contributor"])
def test_a_pod_finds_its_token_where_the_job_puts_it(role: str) -> None:
    base = DEPLOY / "k8s/base"
    (file,) = (base / name for name in (f"{role}.yaml", f"{role}s.yaml") if (base / name).exists())
    (pod,) = (
        document["spec"]["template"]["spec"]
        for document in yaml.safe_load_all(file.read_text())
        if document["kind"] == "StatefulSet"
    )
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["tokens"]["secret"]["secretName"] == "heterorl-tokens"
    (container,) = pod["containers"]
    environ = {entry["name"]: entry.get("value") for entry in container["env"]}
    (mount,) = (entry for entry in container["volumeMounts"] if entry["name"] == "tokens")
    assert environ["HETERORL_NODE__TOKEN_FILE"] == f"{mount['mountPath']}/{role}"
