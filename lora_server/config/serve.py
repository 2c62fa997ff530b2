"""The settings of a node, and of the processes that it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from lora_server.address import Address
from lora_server.config.checks import check_leaders, check_ports, check_replicas
from lora_server.config.types import (
    AUTO_RANK,
    TCP,
    Classes,
    Controllers,
    Host,
    LayoutName,
    Listens,
    NodeRank,
    Paths,
    PoolSize,
    Publishes,
    Texts,
)
from lora_server.logs import Format
from lora_server.placement import MOST_REPLICAS, Layout, share
from lora_server.ports import HIGHEST, DataPorts
from lora_server.timings import DEFAULTS, Timings
from lora_server.units import Size


class ServeConfig(BaseSettings):
    """One node of a server; rank 0 also runs the controller. Flags, their help and defaults come from here."""

    model_config = SettingsConfigDict(env_prefix="LORA_SERVER_", extra="forbid", frozen=True)

    base_model: str = Field(description="Model directory (of its weights only samples are read), or a preset name.")
    adapters: Path | None = Field(None, description="Serve every PEFT adapter that is a sub-directory of this one.")
    require_all_adapters: bool = Field(
        False, description="Not ready while an adapter of --adapters is refused at the start."
    )
    watch: bool = Field(
        False, description="Mirror --adapters: adapters added, changed or deleted there are added, updated or removed."
    )
    adapter_root: Paths = Field(
        (),
        description="Directory below which `adapters add` may take adapters, links followed; repeatable. Default: "
        "--adapters and, while --listen is a loopback address, the directory where the server was started.",
    )
    allow_source: Texts = Field(
        (),
        description="URL prefix that `adapters add` accepts, such as s3://adapters; repeatable. Redirects must stay "
        "below one. Default: any URL, and redirects to public addresses.",
    )
    resolve: str = Field(
        "",
        description="Template for names that were not added, such as s3://adapters/{tenant}/{name}: the first request "
        "for a name adds it.",
    )
    classes: Classes | None = Field(
        None,
        description="SLO classes: a file, YAML, of names with slo and adapters; in the --config file, such a mapping. "
        "A plan.yaml has those of its plan. Default: none.",
    )
    layout: LayoutName = Field("ep1-pp1", description="epX-ppY: X shards per stage, Y stages.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where weights lie and steps are computed.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type of weights in memory; with --device cuda the default is bfloat16."
    )
    gpu_transport: Literal["cuda_ipc", "gpu", "nvshmem"] = Field(
        "cuda_ipc",
        description="With --device cuda, what serves engines on GPUs. cuda_ipc: the shard's loop launches each step. "
        "gpu: a persistent kernel. nvshmem: the same, also across nodes, and not run on a GPU yet.",
    )
    nvshmem_clients: int = Field(
        0,
        ge=0,
        le=1024,
        description="With --gpu-transport nvshmem, the number of engine processes in its world. It serves once all of "
        "them and all shards have joined; others cannot join later.",
    )
    device_pool: PoolSize = Field(
        Size(share=0.8), description="Memory per shard for resident adapters: 40GiB, or a share of what is free."
    )
    host_pool: PoolSize | None = Field(
        None,
        description="Host memory per shard for evicted adapters, like --device-pool. Default: none on cpu; on cuda as "
        "much as the device pool, at most a quarter of it for all shards of a node.",
    )
    disk_cache: Path | None = Field(
        None,
        description="Directory for files of remote adapters, and of those that node 0 sent. Default: in --data-dir.",
    )
    disk_cache_size: PoolSize = Field(
        Size(share=0.2), description="Most bytes in --disk-cache: 100GiB, or a share of its file system."
    )
    eviction: Literal["lru", "value"] = Field(
        "lru", description="lru: evict the least recently used. value: evict what is cheapest to reload per byte."
    )
    preload: bool = Field(
        False, description="While idle, fill free device memory with the adapters most likely to be used."
    )
    max_active_adapters: int = Field(
        0, ge=0, description="Most adapters in use at once. 0: as many as the device pools hold."
    )
    host_link_gbps: float = Field(
        0.0, ge=0, description="Throttle copies into the device pool (Gbit/s), for experiments. 0: off."
    )
    listen: Listens = Field(Address("127.0.0.1", 7400), description="Address of the controller's gRPC.")
    grpc_reflection: bool = Field(False, description="Serve gRPC reflection (grpcurl). It answers without a token.")
    http: Listens = Field(
        Address("127.0.0.1", 7401), description="Address of the status page, /livez, /readyz and /metrics."
    )
    events: Publishes = Field(
        "ipc",
        description="Publish events by ZeroMQ. ipc: on a socket in the run directory, for this user's processes. "
        "tcp://HOST:PORT: encrypted, for readers with a token's rights. off: not.",
    )
    require_tokens: bool = Field(False, description="Reject unauthenticated calls even before the first token exists.")
    insecure: bool = Field(
        False, description="Listen on other than loopback addresses without tokens or TLS. Trusted networks only."
    )
    tls_cert: Path | None = Field(
        None, description="Certificate for --listen and --http, PEM; reloaded when it changes."
    )
    tls_key: Path | None = Field(None, description="Private key of --tls-cert.")
    tls_ca: Path | None = Field(
        None, description="CA that signed the controller's certificate: shards and other nodes verify it."
    )
    tls_client_ca: Path | None = Field(
        None, description="CA of client certificates: --listen then refuses clients without one."
    )
    tls_name: str = Field(
        "", description="Name in the controller's certificate, if it differs from the address. Default: the address."
    )
    data_port_base: int | None = Field(
        None, ge=1, le=HIGHEST, description="First TCP port for data, for firewalls. Default: random ports."
    )
    data_dir: Path | None = Field(
        None,
        description="State directory (sockets, registry). Default: a temporary directory, deleted on exit.",
    )
    registry: str = Field(
        "",
        repr=False,
        description="Registry that several servers share, postgresql://USER@HOST/DATABASE. Default: a file in "
        "--data-dir.",
    )
    no_copy: bool = Field(
        False,
        description="Read adapters where they lie, on storage that every node mounts. Default: node 0 copies added "
        "adapters into --data-dir and sends other nodes what they need.",
    )
    nodes: int = Field(1, ge=1, description="Number of nodes of this server.")
    replicas: int = Field(
        1,
        ge=1,
        le=MOST_REPLICAS,
        description="Copies of every shard, each on another node: a step whose shard fails goes to its twin. Needs as "
        "many nodes, and --device-pool in bytes.",
    )
    failover_ms: int = Field(
        1000,
        ge=1,
        le=600_000,
        description="With --replicas, silence (ms) of a shard after which a step is sent to its twin: longer than any "
        "step takes under load.",
    )
    node_rank: NodeRank = Field(
        0,
        description="Rank of this node; rank 0 runs the controller. auto: the controller leases the node a free rank "
        "above 0; while every rank has a node, this one stands by.",
    )
    launcher: Literal["none", "ray"] = Field(
        "none",
        description="none: this command runs one node. ray: it starts all nodes as actors of a Ray cluster "
        "(RAY_ADDRESS), each on a host of its own, at the ports of --listen and --http, and stops them with itself.",
    )
    controller: Controllers | None = Field(
        None,
        description="Node 0's --listen; required on the other nodes. With a standby the addresses of both controllers, "
        "A:7400,B:7400, the same text on every node.",
    )
    controller_seconds: float = Field(
        300.0, gt=0, description="Longest time (s) that a starting node waits for --controller."
    )
    standby: bool = Field(
        False,
        description="Run a second controller instead of a node: it takes over when the one that leads ends. Needs both "
        "addresses in --controller, --registry and --join-token-file.",
    )
    join_token_file: Path | None = Field(
        None, description="File with the secret that the other nodes show to node 0; the same text on every node."
    )
    advertise: Host = Field("", description="Host at which other hosts reach this node. Default: its own address.")
    max_step_rows: int = Field(
        256,
        ge=1,
        le=65536,
        description="Most rows times experts per message; larger steps are split. With --gpu-transport gpu or nvshmem "
        "the default is 1024.",
    )
    wire: Literal["exact", "e4m3"] = Field(
        "exact", description="Format of activations and deltas. e4m3: 8 bits, and a scale per row."
    )
    slots: int = Field(4, ge=1, le=64, description="Messages in flight per client and shard.")
    coordination: Literal["independent", "leader"] = Field(
        "independent", description="Order of steps in a stage: each shard its own, or the one of the stage's leader."
    )
    threads: int = Field(1, ge=1, description="CPU threads per shard.")
    log_format: Format = Field("auto", description="Log lines. auto: console in a terminal, json elsewhere.")
    otlp_endpoint: str = Field(
        "",
        description="OpenTelemetry collector for traces (OTLP over HTTP), such as http://127.0.0.1:4318. Default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    lease_seconds: float = Field(10.0, gt=0, description="Silence (s) after which a client's lease ends.")
    clients_per_token: int = Field(
        8192, ge=1, description="Most clients per token at once; without tokens, of all callers together."
    )
    timings: Timings = DEFAULTS  # for tests and experiments, so it is no flag

    @model_validator(mode="before")
    @classmethod
    def _device_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("device") == "cuda":
            values = {"dtype": "bfloat16"} | values
        if values.get("gpu_transport") in ("gpu", "nvshmem"):
            values = {"max_step_rows": 1024} | values
        return values

    @model_validator(mode="after")
    def _check_device(self) -> ServeConfig:
        if self.device == "cuda" and self.dtype == "float32":
            raise ValueError("--dtype: got float32 with --device cuda, expected bfloat16 or float16: the engine's")
        if self.gpu_transport != "cuda_ipc" and self.device != "cuda":
            raise ValueError(f"--gpu-transport: got {self.gpu_transport} with --device {self.device}, expected cuda")
        if self.gpu_transport != "cuda_ipc" and self.coordination == "leader":
            check_leaders(self.replicated, self.nodes, self.gpu_transport)
        if (self.gpu_transport == "nvshmem") != (self.nvshmem_clients > 0):
            raise ValueError(
                f"--nvshmem-clients: got {self.nvshmem_clients} with --gpu-transport {self.gpu_transport}, expected at "
                "least 1 with nvshmem and 0 without: its world has a fixed number of PEs"
            )
        if self.watch and self.adapters is None:
            raise ValueError("--watch: got no --adapters, expected the directory to follow; add --adapters DIR")
        return self

    @model_validator(mode="after")
    def _check_node(self) -> ServeConfig:
        if self.node_rank == AUTO_RANK and self.nodes == 1:
            raise ValueError("--node-rank: got auto with --nodes 1, expected 0: more nodes have ranks to lease")
        if not AUTO_RANK <= self.node_rank < self.nodes:
            raise ValueError(f"--node-rank: got {self.node_rank}, expected one from 0 on, below --nodes {self.nodes}")
        check_replicas(self.replicas, self.nodes, self.gpu_transport, self.coordination, self.device_pool)
        if self.nodes > (num_shards := self.replicated.num_shards) and self.why_fixed:
            raise ValueError(
                f"--nodes: got {self.nodes}, expected at most {num_shards}: {self.layout} has fewer shards, and "
                f"{self.why_fixed}"
            )
        if self.node_rank and not self.controller:
            raise ValueError("--controller: got none with --node-rank auto or above 0, expected node 0's --listen")
        return self

    @model_validator(mode="after")
    def _check_launcher(self) -> ServeConfig:
        if self.launcher == "ray" and (self.node_rank or self.controller or self.standby):
            raise ValueError(
                "--launcher: got ray with --node-rank, --controller or --standby, expected it alone: Ray places the "
                "nodes, and node 0 has the controller"
            )
        return self

    @model_validator(mode="after")
    def _check_standby(self) -> ServeConfig:
        if self.standby and (self.node_rank or not self.has_standby):
            raise ValueError(
                f"--standby: got --node-rank {self.node_rank} and --controller {self.controller or 'none'}, expected "
                "rank 0 and the addresses of both controllers: --controller A:7400,B:7400"
            )
        if self.has_standby and not self.node_rank:
            if not self.registry.startswith("postgresql"):
                raise ValueError(
                    f"--controller: got {self.controller} and no --registry, expected the postgresql:// that both "
                    "controllers share: its lock decides which of them leads"
                )
            if self.join_token_file is None:
                raise ValueError(
                    f"--controller: got {self.controller} and no --join-token-file, expected the same one for both "
                    "controllers and every node: shards know their controllers by it"
                )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> ServeConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert: got one of --tls-cert and --tls-key, expected both or neither")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("--tls-cert needs --tls-ca: the shards verify the controller's certificate with it")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca: got one without --tls-cert, expected both")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> ServeConfig:
        own = {"--http": self.http} | ({} if self.node_rank else {"--listen": self.listen})
        if self.events_address is not None and not self.node_rank:
            own["--events"] = self.events_address
        check_ports(self.data_ports, self.layout, own)
        return self

    @property
    def replicated(self) -> Layout:
        """The layout, with its replicas."""
        return Layout.parse(self.layout, self.replicas)

    @property
    def why_fixed(self) -> str:
        """Why the server cannot be resized; empty if it can."""
        settings = {
            f"--gpu-transport {self.gpu_transport}": self.gpu_transport != "cuda_ipc",
            f"--data-port-base {self.data_port_base}": self.data_port_base is not None,
        }
        given = next((setting for setting, is_given in settings.items() if is_given), "")
        return f"a server with {given} cannot be resized while it serves" if given else ""

    @property
    def has_standby(self) -> bool:
        """Whether the server has a second controller, which takes over."""
        return self.controller is not None and self.controller.has_standby

    @property
    def events_address(self) -> Address | None:
        """The address of --events over TCP."""
        return Address.parse(self.events.removeprefix(TCP)) if self.events.startswith(TCP) else None

    @property
    def data_ports(self) -> DataPorts:
        """The TCP ports of the server's shards and stages."""
        return DataPorts(self.data_port_base, self.replicated)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        *others: Any,
        **named: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come as init; `load` puts the file below the environment."""
        return init_settings, env_settings


class ProcessConfig(ServeConfig):
    """Settings of a process that a node starts: the node's own, and what the node found out."""

    spec_json: str  # of the base model
    bind_host: str  # where shards listen; `advertise` is where others reach them, `controller` is rank 0's also there
    run_dir: Path  # of the node's sockets
    shard: int = -1  # of a shard process
    generation: int = 1  # of the placement that `layout` describes
    secret: str = Field(repr=False)  # that its shards show to the controller
    restarted: bool = False  # in the place of one that died

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take the node's settings alone: the environment must not change them again."""
        return (init_settings,)

    @property
    def local_shards(self) -> range:
        """The shards of this node."""
        return share(self.replicated.num_shards, self.nodes, self.node_rank)
