"""Tenants and their limits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lora_server.cli.call import DEFAULT_SERVER, JsonOption, ServerOption, one_line_errors, print_json
from lora_server.cli.local import DataDirOption, RegistryOption, ask_access
from lora_server.units import Size, size
from lora_server.wire.plain import fields

if TYPE_CHECKING:
    from lora_server.wire import lora_server_pb2 as pb

COLUMNS = ("tenant", "weight", "SLO class", "adapters", "bytes", "in use", "a second")

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Tenants and their limits.")
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="1 to 64 of a-z, 0-9 and -.")]


@app.command("set")
@one_line_errors()
def set_tenant(
    name: TenantName,
    weight: Annotated[
        float, typer.Option(help="Share of the server under contention, relative to other tenants.")
    ] = 1.0,
    slo_class: Annotated[
        str, typer.Option(help="SLO class, of the server's --classes, of its requests. (default: none)")
    ] = "",
    max_adapters: Annotated[int, typer.Option(help="Most registered adapters; 0: no limit.")] = 0,
    max_bytes: Annotated[str, typer.Option(help="Most bytes of adapter files, such as 10GiB; 0: no limit.")] = "0",
    max_active: Annotated[int, typer.Option(help="Most adapters in use at once; 0: no limit.")] = 0,
    max_rate: Annotated[float, typer.Option(help="Most adds and acquires per second; 0: no limit.")] = 0.0,
    server: ServerOption = DEFAULT_SERVER,
    data_dir: DataDirOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Create a tenant, or replace all its limits."""
    from lora_server.errors import ConfigError
    from lora_server.wire import lora_server_pb2 as pb

    if min(max_adapters, max_active) < 0 or max(max_adapters, max_active) >= 1 << 32:
        raise ConfigError(f"--max-adapters, --max-active: got {max_adapters}, {max_active}, expected 0 or more")
    request = pb.Tenant(
        name=name,
        weight=weight,
        max_adapters=max_adapters,
        max_active=max_active,
        max_rate=max_rate,
        slo_class=slo_class,
    )
    request.max_bytes = 0 if max_bytes == "0" else Size.parse(max_bytes).nbytes
    _show([ask_access(server, data_dir, registry, "SetTenant", request)], as_json)


@app.command("list")
@one_line_errors()
def list_tenants(
    server: ServerOption = DEFAULT_SERVER,
    data_dir: DataDirOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
) -> None:
    """List tenants and their limits."""
    from lora_server.wire import lora_server_pb2 as pb
    from lora_server.wire.listing import all_pages

    ask = partial(ask_access, server, data_dir, registry, "ListTenants")
    _show(all_pages(ask, pb.ListTenantsRequest).tenants, as_json)


@app.command("remove")
@one_line_errors()
def remove(
    name: TenantName,
    server: ServerOption = DEFAULT_SERVER,
    data_dir: DataDirOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
) -> None:
    """Remove a tenant and revoke its tokens.

    Its adapters stay, visible to the operator only, until they are removed.
    """
    from lora_server.wire import lora_server_pb2 as pb

    _show([ask_access(server, data_dir, registry, "RemoveTenant", pb.RemoveTenantRequest(name=name))], as_json)


def _show(tenants: Any, as_json: bool) -> None:
    from lora_server import terminal

    if as_json:
        print_json([{name: value or None for name, value in fields(one).items()} for one in tenants])
    else:
        terminal.table(
            terminal.open_console(),
            COLUMNS,
            [_cells(one) for one in tenants],
            left=("tenant", "SLO class"),
            wrapped="tenant",
        )


def _cells(tenant: pb.Tenant) -> list[str]:
    name = f"{tenant.name} (removed)" if tenant.removed else tenant.name
    limits = (tenant.max_adapters, size(tenant.max_bytes) if tenant.max_bytes else 0, tenant.max_active)
    shown = [str(one) if one else "-" for one in limits]
    return [
        name,
        f"{tenant.weight:g}",
        tenant.slo_class or "-",
        *shown,
        f"{tenant.max_rate:g}" if tenant.max_rate else "-",
    ]
