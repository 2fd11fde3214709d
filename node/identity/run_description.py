"""The public facts of a run: what every peer must be given to know friend from stranger."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.errors import StartupError
from node.identity.certificates import read_certificate
from node.identity.files import cannot_read, write_public
from node.limits import NAME_PATTERN

FILE_NAME: Final = "run.json"
_FILE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class RunDescription:
    """A run's name, its certificate authority, and the key that signs its policy versions.

    None of it is secret, all of it must be authentic: copy the file by a channel you trust.
    """

    run_id: str
    ca_certificate_pem: bytes
    learner_public_key: bytes
    """32 bytes, Ed25519. Manifests signed by any other key are refused, whoever serves them."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read ``run.json``.

        Raises StartupError: it is missing or is not a run description.
        """
        fix = (
            "Copy run.json from the directory that `heterorl-node init` made, and name it with --run-file "
            "(node.run_file)."
        )
        try:
            with path.open("rb") as file:
                content = file.read(_FILE_BYTES)
            parsed = _RunFile.model_validate_json(content)
            ca_certificate_pem = parsed.ca_certificate_pem.encode()
            read_certificate(ca_certificate_pem)
        except OSError as error:
            raise cannot_read(path, error, fix=fix) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise StartupError(
                f"{path} is not a run description: {where}: {first['msg']}", fix=fix
            ) from error
        except ValueError as error:
            raise StartupError(
                f"{path} is not a run description: ca_certificate_pem is not a certificate", fix=fix
            ) from error
        return cls(parsed.run_id, ca_certificate_pem, bytes.fromhex(parsed.learner_public_key))

    def save(self, path: Path) -> None:
        """Write ``run.json``."""
        content = _RunFile(
            run_id=self.run_id,
            ca_certificate_pem=self.ca_certificate_pem.decode(),
            learner_public_key=self.learner_public_key.hex(),
        )
        write_public(path, content.model_dump_json(indent=2).encode() + b"\n")


class _RunFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str = Field(pattern=NAME_PATTERN)
    ca_certificate_pem: str
    learner_public_key: str = Field(pattern=r"^[0-9a-f]{64}$")
