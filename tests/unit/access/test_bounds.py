"""Every RPC with every field at its bounds, and beyond; derived from descriptors, so that a new RPC is tested, too."""

import contextlib
import json
import math
import shutil

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor as Field
from grpc_health.v1 import health_pb2

from lora_server.access.identity import Identity, Role
from lora_server.access.rights import RIGHTS
from lora_server.adapters.config import MAX_INVOCATION
from lora_server.control.adapters.allowed import Allowed
from lora_server.control.adapters.records import Record
from lora_server.control.members.leases import EngineTraits, Leases
from lora_server.control.reports.status import MOST_HELD, MOST_JOINED, status
from lora_server.daemon.kept import MOST_GONE, Kept
from lora_server.errors import AdapterFormatError, ConfigError, LimitError, LoraServerError, UnknownAdapterError
from lora_server.registry.versions import Ledger
from lora_server.slo import SloClasses
from lora_server.wire import bounds
from lora_server.wire import lora_server_pb2 as pb
from lora_server.wire.credentials import Credentials
from lora_server.wire.proofs import lend
from lora_server.wire.rpc import open_channel, translate
from tests.support.controllers import kept, make_tiny_controller
from tests.support.gated import Gated
from tests.support.serving import HANG_SECONDS
from tests.support.signed import proof_of, signed
from tests.support.workload import spec_of

SERVICES = (*pb.DESCRIPTOR.services_by_name.values(), *health_pb2.DESCRIPTOR.services_by_name.values())
CALLS = {f"{one.name}/{method.name}": method for one in SERVICES for method in one.methods}
CALLS = {call: method for call, method in CALLS.items() if call in RIGHTS}
WIDE = "\U00010300"  # a printable character of four bytes
NUMBERS = {
    Field.CPPTYPE_UINT32: (2**32 - 1, ()),
    Field.CPPTYPE_UINT64: (2**63 - 1, (2**63, 2**64 - 1)),
    Field.CPPTYPE_DOUBLE: (math.nextafter(2.0**63, 0), (math.nan, math.inf, -math.inf, 2.0**63, -(2.0**63))),
    Field.CPPTYPE_BOOL: (True, ()),
}  # the largest, and what is refused


def bound_of(field):
    return bounds.BOUNDS.get(f"{field.containing_type.name}.{field.name}", bounds.DEFAULT)


def new(kind):
    return message_factory.GetMessageClass(kind)()


def put(message, field, values):
    """Set a field, the last of `values` where it has only one."""
    mine = getattr(message, field.name)
    if field.message_type is None:
        mine.extend(values) if field.is_repeated else setattr(message, field.name, values[-1])
    else:
        mine.extend(values) if field.is_repeated else mine.CopyFrom(values[-1])
    return message


def largest(kind, text="x", sign=1, times=1):
    """The largest message of a kind that `check` passes `times` in one request; of a oneof, its last field. `sign` of
    its doubles."""
    message = new(kind)
    for field in kind.fields:
        bound = bound_of(field)
        items = bound.items // times if field.is_repeated else 1
        if field.message_type is not None:
            value = largest(field.message_type, text, sign, times * items)
        elif field.type == Field.TYPE_BYTES:
            value = b"x" * bound.length
        else:
            number = NUMBERS.get(field.cpp_type, (0,))[0]
            value = text * bound.length if field.type == Field.TYPE_STRING else number
            value = sign * value if field.type == Field.TYPE_DOUBLE else value
        put(message, field, [value] * items)
    return message


def beyond(kind):
    """(field, message) for everything that is out of bounds by one."""
    for field in kind.fields:
        bound, where = bound_of(field), f"{kind.name}.{field.name}"
        if field.message_type is not None:
            inner, good = beyond(field.message_type), new(field.message_type)
            yield from ((named, put(new(kind), field, [one])) for named, one in inner)
        elif field.type == Field.TYPE_BYTES:
            bad, good = [b"x" * (bound.length + 1)], b""
        elif field.type == Field.TYPE_STRING:
            controls = ["a\x00b", "\x1b[2J", "\x7f", "a\nb", "\u202eb", "\x85"] if bound.printable else []
            bad, good = ["x" * (bound.length + 1), WIDE * (bound.length + 1), *controls], ""
        else:
            good, bad = NUMBERS[field.cpp_type][0], list(NUMBERS[field.cpp_type][1])
        if field.message_type is None:
            yield from ((where, put(new(kind), field, [one])) for one in bad)
        if field.is_repeated:
            yield where, put(new(kind), field, [good] * (bound.items + 1))


def test_every_field_has_bounds_and_the_largest_request_fits_a_message():
    known = {f"{kind}.{field.name}" for kind, of in pb.DESCRIPTOR.message_types_by_name.items() for field in of.fields}
    assert set(bounds.BOUNDS) <= known
    for call, method in CALLS.items():
        for text in ("x", WIDE):
            request = largest(method.input_type, text)
            bounds.check(request)
            assert request.ByteSize() <= bounds.REQUEST_BYTES, call
    registration = pb.ShardReport(registration=largest(pb.Registration.DESCRIPTOR, WIDE))
    assert pb.ShardReports(reports=[registration]).ByteSize() <= bounds.REQUEST_BYTES


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tiny_adapters):
    """An adapter with as much to keep as an adapter may have."""
    root = shutil.copytree(tiny_adapters["all"], tmp_path_factory.mktemp("largest") / "adapter")
    file = root / "adapter_config.json"
    config = json.loads(file.read_text()) | {"alora_invocation_tokens": [2**31 - 1] * MAX_INVOCATION}
    file.write_text(json.dumps(config))
    shutil.copytree(tiny_adapters["down"], root.with_name("other"))
    return root


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        controller = make_tiny_controller(allowed=Allowed(roots=("/",)))
        yield Gated(tmp_path_factory.mktemp("bounds"), stack, controller=controller)


class Caller:
    """Calls any RPC with one token, and keeps the code of what came of each."""

    def __init__(self, gated, token, stack):
        self.address = gated.address
        self.channel = stack.enter_context(open_channel(gated.address, Credentials(token=token)))

    def ask(self, call, request):
        """The first answer. Raises the server's error."""
        method = CALLS[call]
        streams = method.client_streaming or method.server_streaming
        ask = (self.channel.stream_stream if streams else self.channel.unary_unary)(
            f"/{method.containing_service.full_name}/{method.name}",
            type(request).SerializeToString,
            message_factory.GetMessageClass(method.output_type).FromString,
        )
        try:
            return next(ask(iter([request]), timeout=HANG_SECONDS)) if streams else ask(request, timeout=HANG_SECONDS)
        except grpc.RpcError as error:
            raise translate(error, self.address) from None

    def outcome(self, call, request):
        try:
            self.ask(call, request)
        except LoraServerError as error:
            return error.code
        return "ok"


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_field_beyond_its_bounds_is_refused_by_name(gated, call, stack):
    allowed = [token for who, token in gated.tokens.items() if RIGHTS[call].allows(Identity(*who))]
    caller = Caller(gated, allowed[0], stack)
    for where, request in beyond(CALLS[call].input_type):
        with pytest.raises(ConfigError, match=f"{where}: got "):
            caller.ask(call, request)


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_field_at_its_bounds_has_a_typed_outcome_for_every_role(gated, call, stack):
    right, method = RIGHTS[call], CALLS[call].input_type
    for (tenant, role), token in gated.tokens.items():
        caller = Caller(gated, token, stack)
        codes = {caller.outcome(call, largest(method, *how)) for how in (("x",), (WIDE,), ("x", -1))}
        if right.allows(Identity(tenant, role)):
            assert "error" not in codes, (tenant, role, codes)
        else:
            assert codes == {"permission_denied"}, (tenant, role)


# refused whatever the request says: there is no such tenant, no NVSHMEM and no publisher, and the caller is no shard
REFUSED = {
    "Access/RemoveTenant", "Clients/World", "Events/Open", "Server/Resize",
    "Shards/Files", "Shards/FollowLayouts", "Shards/LeaseRank", "Shards/Read", "Shards/Register",
}  # fmt: skip


LONGEST_CLASS = "x" * 64


def accepted(gated, adapter, call, proof):
    """The largest request of a call that the server accepts: at its bounds, but for what has to name something."""
    request = largest(CALLS[call].input_type)
    path, name = str(adapter.with_name("other") if "Update" in call else adapter), "x" * bounds.DEFAULT.length
    values = {
        "uri": f"{path}{'/.' * ((bounds.URI.length - len(path)) // 2)}",
        "name": "tenant" if "Tenant" in call else name, "tenant": "acme", "on_behalf_of": "", "role": "engine",
        "weight": 1.0, "max_rate": 1e6, "token": gated.tokens["acme", Role.ENGINE],
        "id": gated.tokens["acme", Role.VIEWER].split("_")[1], "overlap_seconds": 30 * 86400.0, "seconds": 0.0,
        "page_token": f"0:{name}", "version": "", "stop": False, "slo_class": LONGEST_CLASS,
    }  # fmt: skip
    for field in CALLS[call].input_type.fields:
        if field.name == "holder":
            mac = lend(proof.key, proof.client, proof.epoch)
            request.holder.CopyFrom(pb.Proof(client=proof.client, epoch=proof.epoch, mac=mac))
        elif field.name in ("place", "shard", "drain_seconds"):
            request.ClearField(field.name)
        elif field.name == "names":
            request.names[:] = [name] * len(request.names)
        elif field.name == "entries":
            for number, entry in enumerate(request.entries, start=1):
                entry.acquire.on_behalf_of, entry.acquire.ticket = "", number
        elif field.name in values:
            setattr(request, field.name, values[field.name])
    proofs = [field for field in CALLS[call].input_type.fields if field.message_type is pb.Proof.DESCRIPTOR]
    return signed(request, proof) if proofs else request


def test_the_largest_request_that_passes_fits_every_message_that_it_becomes(tmp_path, adapter, database, stack):
    """Of every RPC: the commands to shards, the reports that bring them back, and the answers of every other RPC."""
    ledger = Ledger(database, spec_of("mixtral").to_json())
    classes = SloClasses.parse({LONGEST_CLASS: {"slo": "ttft_p99=1s,tpot_avg=1s"}})
    controller = make_tiny_controller(allowed=Allowed(roots=("/",)), ledger=ledger, classes=classes)
    gated = Gated(tmp_path, stack, controller=controller)
    admin = Caller(gated, gated.tokens["", Role.ADMIN], stack)
    lease = admin.ask("Clients/Join", pb.JoinRequest(instance="engine"))
    proof = proof_of(lease)
    last = ["Adapters/Rollback", "Server/Drain", "Clients/Release", "Clients/Leave"]
    last += ["Adapters/Remove", "Access/RevokeToken"]
    first = ("Adapters/Add", "Adapters/Update", "Clients/Join", "Clients/Acquire")
    order = [*first, *sorted(CALLS.keys() - {*first, *last}), *last]
    reads = ("Adapters/List", "Adapters/Get", "Server/Status", "Access/ListTokens", "Access/ListTenants")
    refused = set()
    for call in order:
        if admin.outcome(call, accepted(gated, adapter, call, proof)) != "ok":
            refused.add(call)
        for read in reads if call in first else ():
            admin.ask(read, accepted(gated, adapter, read, proof))
        reports = [*gated.shard.memory.reports(lambda handle: 2**32 - 1)]
        registration = pb.ShardReport(registration=gated.shard.memory.sign(pb.Registration()))
        assert all(one.ByteSize() <= bounds.REQUEST_BYTES for one in (*reports, registration)), call
        assert gated.shard.largest <= bounds.KEPT_BYTES, call
    assert refused == REFUSED
    assert gated.get("/status.json", f"Bearer {gated.tokens['', Role.ADMIN]}")[0] == 200


def test_a_shard_keeps_a_bounded_number_of_dropped_handles():
    memory = Kept()
    for handle in range(1, MOST_GONE + 11):
        memory.note(pb.ShardCommand(drop=handle))
    assert [*memory.gone] == [*range(11, MOST_GONE + 11)], "the last ones: the others were heard long ago"
    bounds.check(memory.sign(pb.Registration()))
    memory.note(pb.ShardCommand(uses=pb.Uses(active=pb.Active(more=range(1 << 20)))))
    bounds.check(memory.sign(pb.Registration()))


def test_clients_are_limited_per_token():
    leases = Leases(most_per_token=2)
    first, _ = leases.grant("a", EngineTraits(token="one")), leases.grant("b", EngineTraits(token="one"))
    with pytest.raises(LimitError, match=r"token one: .* at most 2 per token.* --clients-per-token"):
        leases.grant("c", EngineTraits(token="one"))
    leases.grant("c", EngineTraits(token="two"))
    leases.end(first.client, first.epoch)
    leases.grant("d", EngineTraits(token="one"))


def test_status_names_a_bounded_number_of_clients_and_adapters():
    controller = make_tiny_controller()
    for number in range(MOST_JOINED + 1):
        controller.clients.leases.grant(f"engine {number}")
    for handle in range(1, MOST_HELD + 2):
        controller.adapters.catalog.publish(Record.decode(kept(f"adapter-{handle}", handle).record))
        controller.adapters.admission.holds.acquire(1, [handle])
    reply = status(controller)
    assert (reply.clients, len(reply.joined)) == (MOST_JOINED + 1, MOST_JOINED)
    assert (reply.joined[0].held, len(reply.joined[0].adapters)) == (MOST_HELD + 1, MOST_HELD)


def test_an_error_fits_the_trailers_of_its_call(gated, stack):
    """However long what it says is, and whatever bytes it takes."""
    caller = Caller(gated, gated.tokens["", Role.ADMIN], stack)
    names = [WIDE * bounds.DEFAULT.length] * 1024
    lease = caller.ask("Clients/Join", pb.JoinRequest(instance="engine"))
    with pytest.raises(UnknownAdapterError):
        caller.ask("Clients/Acquire", signed(pb.AcquireRequest(names=names), proof_of(lease)))
    with pytest.raises(AdapterFormatError):
        caller.ask("Adapters/Add", pb.AddAdapterRequest(name="a", uri=WIDE * bounds.URI.length))
