"""Make a run and its tokens, and put them into the namespace as the pods expect them.

    init, token  -->  Secrets heterorl-hub-seed, heterorl-learner-seed, heterorl-tokens
                 -->  ConfigMap heterorl-run, last: pods wait for it, and a second Job does nothing

The signing key passes through this Job and the learner's Secret.
Standard library only, beside the command it calls: it runs in the coordinator's image.
"""

import base64
import json
import os
import ssl
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from io import BytesIO
from pathlib import Path
from typing import Any, Final

ACCOUNT: Final = Path(os.environ.get("SERVICE_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
ROLES: Final = ("sampler", "relay", "verifier", "contributor")


def call(method: str, kind: str, name: str = "", body: dict[str, Any] | None = None) -> int:
    """Return the status of one request to Kubernetes' API. Raises HTTPError, but for 404 and 409."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    request = urllib.request.Request(
        f"https://{host}:{port}/api/v1/namespaces/{os.environ['NAMESPACE']}/{kind}/{name}".rstrip("/"),
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/json",
        },
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        if error.code not in (404, 409):
            raise
        return error.code


def put_secret(name: str, files: dict[str, bytes]) -> None:
    """Make a Secret, in place of one that an attempt before left."""
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "data": {file: base64.b64encode(content).decode() for file, content in files.items()},
    }
    if call("POST", "secrets", body=body) == 409:
        call("PUT", "secrets", name, body)


def archive(directory: Path, role: str) -> bytes:
    """Return a tar of a role's folder, with its permissions."""
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(directory / role, role)
    return packed.getvalue()


def main() -> None:
    """Make everything, unless the run is there."""
    if call("GET", "configmaps", "heterorl-run") == 200:
        print("the run is there")
        return
    hosts = os.environ["HUB_HOSTS"].split(",")
    with tempfile.TemporaryDirectory() as made:
        run = Path(made) / "run"
        subprocess.run(["heterorl-node", "init", str(run), *(f"--host={host}" for host in hosts)], check=True)
        tokens = {}
        for role in ROLES:
            command = ["heterorl-node", "token", str(run), "--role", role, "--uses", os.environ["TOKEN_USES"]]
            command += ["--ttl", "7d", "--address", f"{hosts[0]}:7701"]
            tokens[role] = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        # After the tokens: the hub's folder has the list of them.
        put_secret("heterorl-hub-seed", {"state.tar": archive(run, "coordinator")})
        put_secret("heterorl-learner-seed", {"state.tar": archive(run, "learner")})
        put_secret("heterorl-tokens", tokens)
        data = {"run.json": (run / "run.json").read_text()}
    call(
        "POST",
        "configmaps",
        body={"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "heterorl-run"}, "data": data},
    )
    print(
        "the run is made; once hub and learner are ready, delete heterorl-hub-seed and heterorl-learner-seed"
    )


if __name__ == "__main__":
    main()
