"""Every error a user can meet, in one tree; each has a stable `code` that travels on the wire.

LoraServerError
├── ConfigError              a flag, a file, a layout or a request's field that cannot be used
├── AdapterError
│   ├── AdapterFormatError   the files of an adapter are not what they must be
│   ├── UnknownAdapterError  no adapter of that name (or handle) is registered
│   ├── AdapterExistsError   the name is taken
│   ├── AdapterSourceError   it may not come from there, does not come, or is not what was registered
│   ├── AdapterLoadError     a shard could not bring the weights into memory
│   ├── AdapterNotLoadedError  its weights are loading still, and the step or the request could not wait longer
│   └── PermissionDeniedError  the caller's role may not do that, or a step names what its client does not hold
├── UnauthenticatedError     no token, or one that is not good
├── LimitError               a tenant has, or asks for, more than it may
├── AdmissionError           the adapters in use leave no place for another, yet
├── GeometryMismatchError    engine and server do not run the same base model
├── LeaseError               the client's lease is gone (expired, revoked, or never granted)
├── WorldError               NVSHMEM's world has no place for this process, or is over
├── StepError
│   ├── StepTimeoutError     a wait passed its deadline
│   ├── ShardUnavailableError  a shard died or cannot be reached
│   └── ProtocolError        a slot, header or message that breaks the wire contract
└── ServerUnavailableError   the controller does not answer, or is not ready in time
    ├── ServerBusyError      it has as many calls of this kind as it takes
    └── NotLeaderError       it stands by, or another controller leads by now
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class LoraServerError(Exception):
    """Base of all our errors. The text says what was got, what was expected and what to do."""

    code = "error"
    request = ""  # id of the call that a server refused, as its log has it


class ConfigError(LoraServerError):
    """A flag, a file, a layout or a field of a request that cannot be used."""

    code = "config"


class AdapterError(LoraServerError):
    """Something about one adapter; other adapters are not affected."""

    code = "adapter"


class AdapterFormatError(AdapterError):
    """The files of an adapter are not what they must be; names the key, got and expected."""

    code = "adapter_format"


class UnknownAdapterError(AdapterError):
    """No adapter of that name (or handle) is registered."""

    code = "unknown_adapter"


class AdapterExistsError(AdapterError):
    """The name is taken by another version."""

    code = "adapter_exists"


class AdapterSourceError(AdapterError):
    """An adapter may not come from there, or its files do not come, or are not those that were registered."""

    code = "adapter_source"


class AdapterLoadError(AdapterError):
    """A shard could not bring the weights into memory."""

    code = "adapter_load"


class AdapterNotLoadedError(AdapterError):
    """Weights are still loading, and a step or a request could not wait longer. `of` makes the text of a step's."""

    code = "adapter_not_loaded"

    @classmethod
    def of(cls, handles: Iterable[int], reason: str) -> AdapterNotLoadedError:
        """Name the adapters that a step lacks."""
        return cls(f"handles {', '.join(map(str, sorted(handles)))}: {reason}")

    @property
    def handles(self) -> frozenset[int]:
        """The adapters that `of` named, also in the process that rebuilt the error."""
        named = re.match(r"handles ([\d, ]+): ", str(self))
        return frozenset(map(int, named[1].split(", "))) if named else frozenset()


class PermissionDeniedError(AdapterError):
    """The caller's role may not do that, or a step names an adapter that its client does not hold."""

    code = "permission_denied"


class UnauthenticatedError(LoraServerError):
    """No token was shown, or one that is not good, or not any more."""

    code = "unauthenticated"


class LimitError(LoraServerError):
    """A tenant has, or asks for, more than its limits let it."""

    code = "limit"


class AdmissionError(LoraServerError):
    """The adapters that are in use leave no place for another; the same request may succeed later."""

    code = "admission"


class GeometryMismatchError(LoraServerError):
    """Engine and server do not run the same base model."""

    code = "geometry_mismatch"


class LeaseError(LoraServerError):
    """The client's lease is gone: expired, revoked, or never granted."""

    code = "lease"


class WorldError(LoraServerError):
    """NVSHMEM's world has no place for this process, is over, or did not come about."""

    code = "world"


class StepError(LoraServerError):
    """A LoRA step did not complete; names the shard, the slot and the seq."""

    code = "step"


class StepTimeoutError(StepError):
    """A wait of a step passed its deadline."""

    code = "step_timeout"


class ShardUnavailableError(StepError):
    """A shard died or cannot be reached."""

    code = "shard_unavailable"


class ProtocolError(StepError):
    """A slot, header or message that breaks the wire contract."""

    code = "protocol"


class ServerUnavailableError(LoraServerError):
    """The controller does not answer, or is not ready in time."""

    code = "server_unavailable"


class ServerBusyError(ServerUnavailableError):
    """The controller has as many calls of this kind as it takes; try again soon."""

    code = "server_busy"


class NotLeaderError(ServerUnavailableError):
    """The controller stands by, or stopped leading; names the one that leads."""

    code = "not_leader"


def _tree(root: type[LoraServerError]) -> dict[str, type[LoraServerError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: dict[str, type[LoraServerError]] = _tree(LoraServerError)


def rebuild(code: str, message: str) -> LoraServerError:
    """Return the error that another process raised, from its code and text."""
    return BY_CODE.get(code, LoraServerError)(message)
