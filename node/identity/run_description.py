"""The public facts of a run: what every peer must be given to know friend from stranger."""

import json
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

from node.errors import StartupError
from node.identity.certificates import read_certificate
from node.identity.files import cannot_read, write_public
from node.system.sealed import sealed, unsealed
from node.values.limits import NAME_PATTERN

FILE_NAME: Final = "run.json"
_FILE_BYTES: Final = 64 << 10


def _certificate(pem: bytes) -> bytes:
    read_certificate(pem)
    return pem


def _bytes_of_hex(value: object) -> object:
    return bytes.fromhex(value) if isinstance(value, str) else value


def _without_digest(data: bytes) -> bytes:
    """Return a description as older software wrote it; what is none, as it is."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(content, dict):
        return data
    return json.dumps({key: value for key, value in content.items() if key != "digest"}).encode()


class RunDescription(BaseModel):
    """A run's name, its certificate authority, and the key that signs its policy versions.

    None of it is secret, all of it must be authentic: copy the file by a channel you trust.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str = Field(pattern=NAME_PATTERN)
    ca_certificate_pem: Annotated[bytes, AfterValidator(_certificate)]
    learner_public_key: Annotated[
        bytes,
        Field(min_length=32, max_length=32),
        BeforeValidator(_bytes_of_hex),
        PlainSerializer(bytes.hex, when_used="json"),
    ]
    """Ed25519. Manifests signed by any other key are refused, whoever serves them."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read ``run.json``. Raises StartupError: it is missing or is not a run description."""
        fix = (
            "Copy run.json from the directory that `heterorl-node init` made, and name it with --run-file "
            "(node.run_file)."
        )
        try:
            with path.open("rb") as file:
                data = file.read(_FILE_BYTES)
            description = cls.model_validate_json(_without_digest(data))
            unsealed(data)
            return description
        except OSError as error:
            raise cannot_read(path, error, fix=fix) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            what = f"{path} is not a run description: {where}: {first['msg']}"
            raise StartupError(what, fix=fix) from error
        except ValueError as error:
            raise StartupError(f"{path} is damaged: {error}", fix=fix) from error

    def save(self, path: Path) -> None:
        """Write ``run.json``."""
        write_public(path, sealed(self.model_dump_json(indent=2)))
