"""The gRPC server of a controller that stands by: it refuses every call with the error that names the leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from lora_server.access.gate import Gate
from lora_server.control.rpc.calls import Refusals
from lora_server.control.rpc.listener import Listener, Service, StreamCall, StreamMethod
from lora_server.errors import LoraServerError
from lora_server.timings import Timings
from lora_server.wire import lora_server_pb2 as pb


def refuse_calls(
    address: str,
    refusal: Callable[[], LoraServerError],
    gate: Gate,
    tls: grpc.ServerCredentials | None,
    timings: Timings,
) -> Listener:
    """Listen at a port that this node holds, until the result is closed. Raises RuntimeError if it cannot listen."""

    async def refuse(_: Message, __: StreamCall[Message]) -> NoReturn:
        raise refusal()

    def refused(service: ServiceDescriptor) -> Service:
        kind = message_factory.GetMessageClass
        return {method.name: StreamMethod(kind(method.input_type), refuse) for method in service.methods}

    known = [*pb.DESCRIPTOR.services_by_name.values(), *health_pb2.DESCRIPTOR.services_by_name.values()]
    services = {service.full_name: refused(service) for service in known}
    return Listener(address, services, gate, Refusals(), tls=tls, timings=timings, held=True)
