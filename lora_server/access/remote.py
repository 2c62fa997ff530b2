"""Authorizes calls to a node above rank 0, by asking its controller."""

from __future__ import annotations

from lora_server.access import rights, tokens
from lora_server.access.identity import Identity, Role
from lora_server.address import ControllerList
from lora_server.config import ProcessConfig
from lora_server.errors import UnauthenticatedError
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire import lora_server_pb2_grpc as rpc
from lora_server.wire.credentials import Credentials
from lora_server.wire.rpc import call, open_channel

CALL_SECONDS = 2.0


class RemoteGate:
    """Asks the controller for every call. Thread-safe."""

    def __init__(self, controller: ControllerList, config: ProcessConfig) -> None:
        self._server, self._config = str(controller), config

    def admit(self, what: str, authorization: str) -> Identity | None:
        """Return the caller, or None for a public call.

        Raises UnauthenticatedError, PermissionDeniedError, ServerUnavailableError.
        """
        if rights.RIGHTS.get(what, rights.Right()).public:
            return None
        config = self._config
        token = tokens.of_header(authorization)
        if token and tokens.parse(token) is None:  # gRPC's metadata may not take it
            raise UnauthenticatedError(tokens.NOT_GOOD)
        shown = Credentials(token, None, config.tls_ca, config.tls_cert, config.tls_key, config.tls_name)
        with open_channel(self._server, shown) as channel:
            asked = rpc.AccessStub(channel).WhoIs
            caller = call(asked, pb.WhoIsRequest(), server=self._server, seconds=CALL_SECONDS)
        who = Identity(caller.tenant, Role(caller.role), caller.token)
        rights.check(what, who)
        return who

    def allows(self, what: str, authorization: str) -> bool:
        """Allow everything: the pages of a node above rank 0 name no adapter."""
        return True
