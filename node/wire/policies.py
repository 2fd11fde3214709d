"""Policy versions, artifacts and announcements <-> heterorl.v1."""

from google.protobuf.message import Message

from heterorl.v1 import common_pb2, membership_pb2, policy_pb2
from node import limits
from node.errors import Reason, RefusedError
from node.policy import (
    BASE_PART_BYTES,
    BASE_PARTS,
    NO_BASE,
    ROOT_BYTES,
    Announcement,
    Artifact,
    ArtifactKey,
    BaseModel,
    PolicyVersion,
)
from node.wire.mapping import from_wire, to_wire


def policy_version_to_wire(version: PolicyVersion) -> common_pb2.PolicyVersion:
    return to_wire(common_pb2.PolicyVersion, version)


def policy_version_from_wire(message: common_pb2.PolicyVersion) -> PolicyVersion:
    if not 0 <= message.number <= limits.VERSIONS:
        raise RefusedError(
            Reason.MALFORMED, f"policy version {message.number}, allowed are 0 to {limits.VERSIONS}"
        )
    if len(message.root) not in (0, ROOT_BYTES):
        raise RefusedError(Reason.MALFORMED, f"a root of {len(message.root)} bytes; it has {ROOT_BYTES}")
    return PolicyVersion(message.number, message.root)


def optional_version_to_wire(version: PolicyVersion | None) -> common_pb2.PolicyVersion | None:
    return None if version is None else policy_version_to_wire(version)


def optional_version_from_wire(message: Message, field: str) -> PolicyVersion | None:
    """Return the version in a field of ``message``; None where it is unset."""
    return policy_version_from_wire(getattr(message, field)) if message.HasField(field) else None


def base_model_from_wire(request: membership_pb2.JoinRequest) -> BaseModel:
    """Return what a peer says of its version 0 when it joins. Raises RefusedError: MALFORMED."""
    root, parts, names = request.base_root, request.base_parts, tuple(request.base_part_names)
    if (
        len(root) not in (0, ROOT_BYTES)
        or len(parts) > BASE_PARTS * BASE_PART_BYTES
        or len(names) > BASE_PARTS
    ):
        raise RefusedError(
            Reason.MALFORMED,
            f"a base model with a root of {len(root)} bytes, {len(parts)} bytes of parts and {len(names)} "
            f"names; allowed are {ROOT_BYTES}, {BASE_PARTS * BASE_PART_BYTES} and {BASE_PARTS}",
        )
    return BaseModel(root, parts, names)


def artifact_key_to_wire(key: ArtifactKey) -> policy_pb2.ArtifactKey:
    return to_wire(policy_pb2.ArtifactKey, key)


def artifact_key_from_wire(message: policy_pb2.ArtifactKey) -> ArtifactKey:
    if message.version < 0 or not NO_BASE <= message.base_version < message.version:
        raise RefusedError(
            Reason.MALFORMED,
            f"no artifact makes version {message.version} from version {message.base_version}",
            fix="the base is -1 (none) or an older version",
        )
    return ArtifactKey(message.version, message.base_version)


def announcement_to_wire(announcement: Announcement) -> policy_pb2.WatchVersionsResponse:
    return to_wire(
        policy_pb2.WatchVersionsResponse,
        announcement,
        head=policy_version_to_wire(announcement.head),
        artifacts=[
            policy_pb2.Artifact(key=artifact_key_to_wire(artifact.key), size_bytes=artifact.size_bytes)
            for artifact in announcement.artifacts
        ],
    )


def announcement_from_wire(message: policy_pb2.WatchVersionsResponse) -> Announcement:
    if len(message.artifacts) > limits.ARTIFACTS_PER_ANNOUNCEMENT:
        raise RefusedError(Reason.OVER_LIMIT, f"an announcement of {len(message.artifacts)} artifacts")
    if any(artifact.size_bytes < 0 for artifact in message.artifacts):
        raise RefusedError(Reason.MALFORMED, "an artifact of negative size")
    return from_wire(
        Announcement,
        message,
        head=policy_version_from_wire(message.head),
        artifacts=tuple(
            Artifact(artifact_key_from_wire(artifact.key), artifact.size_bytes)
            for artifact in message.artifacts
        ),
    )
