"""A hub's bucket: an object store, of any provider that obstore speaks to, with a payload file per artifact.

    URL/<run id>/<hub's node id>/<version>-<base version or key>-<start of the signature>

An object is written whole or not at all, and never again with other bytes: no write needs a comparison.
Credentials, region and endpoint are obstore's business, which takes them from the provider's environment
variables or from the machine's role. Nothing that comes out of a bucket is trusted.
"""

import re
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from node.errors import HeteroRLError, StartupError
from node.values import limits
from node.values.policy import NO_BASE, ArtifactKey
from node.weights.format.manifest import SIGNATURE_BYTES, Manifest

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

_NAME: Final = re.compile(r"(\d{1,15})-(key|\d{1,15})-[0-9a-f]{16}")

_PART_BYTES: Final = 8 << 20
"""Smallest part of a large object, and the largest object that is sent as one."""

_MOST_PARTS: Final = 9000
"""S3 takes 10 000."""

_PARTS_AT_ONCE: Final = 4
"""Bounds memory; a part has REQUEST_S, which a line of 5 Mbit/s needs for as many."""

REQUEST_S: Final = 60
CONNECT_S: Final = 5
RETRY_S: Final = 10

MOST_LISTED: Final = 4 * limits.ARTIFACTS_PER_ANNOUNCEMENT
"""Objects looked at in one listing. What an earlier process left beyond these shows once they are deleted."""


class BucketError(HeteroRLError):
    """The bucket did not do what it was asked; try again later."""


class Bucket:
    """One hub's part of an object store."""

    def __init__(self, store: "S3Store | GCSStore | AzureStore") -> None:
        self._store = store

    @classmethod
    def open(cls, url: str, *, run_id: str, node_id: str) -> "Bucket":
        """Return the part of ``url`` that is of one hub of a run. Connects to nothing.

        Raises StartupError: obstore refuses the address or what the environment says about it.
        """
        from obstore.store import from_url

        try:
            store = from_url(
                f"{url.rstrip('/')}/{run_id}/{node_id}",
                # Plain http is the operator's choice, by an endpoint in the environment.
                client_options={
                    "allow_http": True,
                    "connect_timeout": f"{CONNECT_S}s",
                    "timeout": f"{REQUEST_S}s",
                },
                retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=RETRY_S)},
            )
        except Exception as error:  # obstore's own, OSError and ValueError
            raise StartupError(
                f"the bucket {url} cannot be used: {_first_line(error)}",
                fix="Check the address, and the provider's environment variables.",
            ) from error
        return cls(store)  # type: ignore[arg-type]  # by the configuration's pattern

    async def listing(self) -> dict[str, int]:
        """Return the size of every object here, by name. Raises BucketError."""
        import obstore

        sizes: dict[str, int] = {}
        with _failing("list"):
            async for objects in obstore.list(self._store):
                sizes.update((each["path"], each["size"]) for each in objects if key_of(each["path"]))
                if len(sizes) >= MOST_LISTED:
                    break
        return sizes

    async def put(self, name: str, blocks: AsyncIterator[bytes], *, size_bytes: int) -> None:
        """Write an object whole. Raises BucketError, and what ``blocks`` raises."""
        import obstore

        with _failing("put"):
            if size_bytes <= _PART_BYTES:
                whole = b"".join([block async for block in blocks])
                await obstore.put_async(self._store, name, whole, use_multipart=False)
            else:
                part_bytes = max(_PART_BYTES, -(-size_bytes // _MOST_PARTS))
                await obstore.put_async(
                    self._store, name, blocks, chunk_size=part_bytes, max_concurrency=_PARTS_AT_ONCE
                )

    async def delete(self, names: Collection[str]) -> None:
        """Delete objects, present or not. Raises BucketError."""
        import obstore

        with _failing("delete"):
            await obstore.delete_async(self._store, sorted(names))

    async def address(self, name: str, *, valid_s: float) -> str:
        """Return a signed address, with which anyone can read an object for so long. Raises BucketError."""
        import obstore

        with _failing("sign"):
            return await obstore.sign_async(self._store, "GET", name, timedelta(seconds=valid_s))


def object_name(manifest: Manifest) -> str:
    """Return the name of an artifact's object: another one for the same words coded anew."""
    key = manifest.key
    base = "key" if key.is_keyframe else key.base_version
    return f"{key.version}-{base}-{manifest.signed[-SIGNATURE_BYTES:][:8].hex()}"


def key_of(name: str) -> ArtifactKey | None:
    """Return the artifact whose payloads an object has, by its name; None: it is not one of ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return ArtifactKey(int(match[1]), NO_BASE if match[2] == "key" else int(match[2]))


@contextmanager
def _failing(operation: str) -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        # Deleted already, or the bucket itself is missing.
        if operation != "delete":
            raise BucketError(f"{operation}: {_first_line(error)}") from error
    except (BaseError, OSError, ValueError) as error:
        raise BucketError(f"{operation}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """Return what happened; obstore adds pages for developers."""
    return str(error).split("\n", 1)[0][:300]
