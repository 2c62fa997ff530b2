"""Settings of `lora-server serve`: flag > environment (LORA_SERVER_*) > --config file > default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from lora_server.address import Address, parse_host
from lora_server.errors import ConfigError
from lora_server.logs import Format
from lora_server.placement import Layout, share
from lora_server.ports import HIGHEST, DataPorts
from lora_server.timings import DEFAULTS, Timings
from lora_server.units import Size


def _read_by(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _address(value: Any) -> Any:
    return _read_by(Address.parse, value) if isinstance(value, str) else value


MOST_LED = 33  # shards of a stage: its leader's kernel tells shard.numbers.MAX_FOLLOWERS others

# NoDecode: HOST:PORT from the environment is not JSON
Listens = Annotated[Address, NoDecode, BeforeValidator(_address), PlainSerializer(str)]


def _size(value: Any) -> Any:
    return value if isinstance(value, Size) else _read_by(Size.parse, str(value))


def _several(value: Any) -> Any:
    return [one for one in value.split(",") if one] if isinstance(value, str) else value


# what may be given several times; from the environment, or as one text, with commas between
Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_several)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_several)]
PoolSize = Annotated[Size, NoDecode, BeforeValidator(_size), PlainSerializer(str)]


class ServeConfig(BaseSettings):
    """One node of a server; rank 0 also runs the controller. Flags, their help and defaults come from here."""

    model_config = SettingsConfigDict(env_prefix="LORA_SERVER_", extra="forbid", frozen=True)

    base_model: str = Field(description="Model directory (its config.json), or a preset name.")
    adapters: Path | None = Field(None, description="Directory whose sub-directories are PEFT adapters.")
    require_all_adapters: bool = Field(False, description="Not ready while one of --adapters is refused at the start.")
    watch: bool = Field(False, description="Follow --adapters while serving: what comes, changes and goes.")
    adapter_root: Paths = Field(
        (),
        description="A directory below which `adapters add` may take adapters, links followed; may be given again. Not "
        "given: that of --adapters and, with --listen on a loopback address, where the server was started.",
    )
    allow_source: Texts = Field(
        (),
        description="What a URL of `adapters add` has to begin with, such as s3://adapters; may be given again. Not "
        "given: any URL.",
    )
    resolve: str = Field(
        "",
        description="Where adapters are that nobody registered, such as s3://adapters/{tenant}/{name}: who asks for "
        "one brings it in.",
    )
    layout: str = Field("ep1-pp1", description="epX-ppY: X shards per stage, Y stages.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="cpu, or cuda: weights and kernels on GPUs.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Weights in memory; bfloat16 by default with --device cuda."
    )
    gpu_transport: Literal["cuda_ipc", "gpu", "nvshmem"] = Field(
        "cuda_ipc",
        description="With --device cuda, who serves engines on GPUs: cuda_ipc, a loop that launches each step; gpu, a "
        "kernel that serves by itself; nvshmem, the same, also across nodes. The last two have run on no GPU yet.",
    )
    nvshmem_clients: int = Field(
        0,
        ge=0,
        le=1024,
        description="With --gpu-transport nvshmem, engine processes in its world, which serves when all of them and "
        "all shards are there, and which no other joins.",
    )
    device_pool: PoolSize = Field(
        Size(share=0.8),
        description="Memory per shard that steps read adapters from: 40GiB, or a share of what is free at the start.",
    )
    host_pool: PoolSize | None = Field(
        None,
        description="Host memory per shard for packed weights of adapters that had to make room; likewise. Not given: "
        "none with --device cpu; with cuda as much as the device pool, all shards of a node a quarter of it at most.",
    )
    disk_cache: Path | None = Field(
        None,
        description="Where this node keeps files of adapters from far, s3:// and the like, and of those that node 0 "
        "sent; without it, in --data-dir.",
    )
    disk_cache_size: PoolSize = Field(
        Size(share=0.2), description="Bytes that --disk-cache may take: 100GiB, or a share of its file system."
    )
    eviction: Literal["lru", "value"] = Field(
        "lru", description="Who makes room: the least recently used, or who saves the least load time per byte."
    )
    preload: bool = Field(
        False, description="Fill device memory that is free with the most valuable adapters while nobody waits."
    )
    max_active_adapters: int = Field(
        0, ge=0, description="Adapters that may be in use together; 0: as many as the device pools hold."
    )
    host_link_gbps: float = Field(
        0.0, ge=0, description="Gbit/s to which copies into the device pool are slowed down, to try things; 0: not."
    )
    listen: Listens = Field(Address("127.0.0.1", 7400), description="Where the controller serves gRPC.")
    grpc_reflection: bool = Field(False, description="Tell whoever asks at --listen which calls there are (grpcurl).")
    http: Listens = Field(
        Address("127.0.0.1", 7401), description="Where a page to look at is, and /livez, /readyz and /metrics."
    )
    require_tokens: bool = Field(
        False, description="Everybody shows a token, also before there is one; without it, once there is one."
    )
    insecure: bool = Field(
        False, description="Listen for other hosts without tokens or TLS: on a network that you trust alone."
    )
    tls_cert: Path | None = Field(
        None, description="Certificate of --listen and --http, PEM; read again when it changes."
    )
    tls_key: Path | None = Field(None, description="Its key.")
    tls_ca: Path | None = Field(
        None, description="Who signed the controller's certificate, for this server's processes."
    )
    tls_client_ca: Path | None = Field(
        None, description="Who signs clients' certificates: with it, whoever has none may not connect to --listen."
    )
    tls_name: str = Field(
        "", description="Name in the controller's certificate, where its address is not; without it, the address."
    )
    data_port_base: int | None = Field(
        None, ge=1, le=HIGHEST, description="First of this server's ports for data, for firewalls; random unless given."
    )
    data_dir: Path | None = Field(
        None,
        description="Where this node keeps its sockets and its registry; without it, a directory that goes with it.",
    )
    registry: str = Field(
        "",
        repr=False,
        description="postgresql://USER@HOST/DATABASE that several servers may share; without it, a file in --data-dir.",
    )
    no_copy: bool = Field(
        False,
        description="Leave files of adapters where they are, for all nodes to see; else node 0 copies those that are "
        "added into --data-dir, and sends other nodes what they need.",
    )
    nodes: int = Field(1, ge=1, description="Nodes that form this server.")
    node_rank: int = Field(0, ge=0, description="This node; 0 runs the controller.")
    controller: Listens | None = Field(None, description="Node 0's --listen, for the other nodes.")
    controller_seconds: float = Field(
        300.0, gt=0, description="Seconds for which a node may look for --controller at first."
    )
    join_token_file: Path | None = Field(
        None, description="File with the token that nodes above rank 0 show; the same text on every node."
    )
    advertise: str = Field("", description="Address at which other hosts reach this node; without it, its own.")
    max_step_rows: int = Field(256, ge=1, le=65536, description="Rows times experts of one message.")
    wire: Literal["exact", "e4m3"] = Field(
        "exact",
        description="How activations and deltas travel: exact, as the engine has them, or e4m3, in 8 bits and a scale "
        "per row.",
    )
    slots: int = Field(4, ge=1, le=64, description="Messages in flight per client and shard.")
    coordination: Literal["independent", "leader"] = Field(
        "independent", description="In which order the shards of a stage serve: independent, or leader."
    )
    threads: int = Field(1, ge=1, description="CPU threads per shard.")
    log_format: Format = Field(
        "auto", description="Lines of the log: json, console, or auto: console in a terminal, json elsewhere."
    )
    otlp_endpoint: str = Field(
        "",
        description="Where a collector of OpenTelemetry takes traces by HTTP, such as http://127.0.0.1:4318; without "
        "it, OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    lease_seconds: float = Field(10.0, gt=0, description="Seconds of silence after which a client is cut off.")
    timings: Timings = DEFAULTS  # for tests and experiments, so it is no flag

    @model_validator(mode="before")
    @classmethod
    def _dtype_of_the_device(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("device") == "cuda":
            return {"dtype": "bfloat16"} | values
        return values

    @field_validator("advertise")
    @classmethod
    def _advertise(cls, text: str) -> str:
        return str(_read_by(parse_host, text)) if text else ""

    @field_validator("layout")
    @classmethod
    def _layout(cls, text: str) -> str:
        return str(Layout.parse(text))

    @model_validator(mode="after")
    def _numbers(self) -> ServeConfig:
        if self.device == "cuda" and self.dtype == "float32":
            raise ValueError("dtype: --device cuda computes in bfloat16 or float16; give --dtype, the engine's")
        if self.gpu_transport != "cuda_ipc" and self.device != "cuda":
            raise ValueError(f"gpu-transport: got {self.gpu_transport} with --device {self.device}, expected cuda")
        if self.gpu_transport != "cuda_ipc" and self.coordination == "leader":
            self._check_leaders()
        if (self.gpu_transport == "nvshmem") != (self.nvshmem_clients > 0):
            raise ValueError(
                f"nvshmem-clients: got {self.nvshmem_clients} with --gpu-transport {self.gpu_transport}, expected at "
                "least 1 with nvshmem and none without: its world has a fixed number of PEs"
            )
        if self.watch and self.adapters is None:
            raise ValueError("watch: got no --adapters, expected the directory to follow; give it, or leave this away")
        return self

    def _check_leaders(self) -> None:
        """A leader's kernel stores into memory of its followers, which only shards of its host can hand to it."""
        layout = Layout.parse(self.layout)
        stages = [[layout.stage(one) for one in share(layout.num_shards, self.nodes, i)] for i in range(self.nodes)]
        if self.gpu_transport == "nvshmem" or sum(len(set(one)) for one in stages) > layout.pp:
            raise ValueError(
                f"coordination: got leader with --gpu-transport {self.gpu_transport}, --layout {layout} and --nodes "
                f"{self.nodes}; expected gpu, and every stage on one node, or independent"
            )
        if layout.ep > MOST_LED:
            raise ValueError(f"coordination: got leader with --layout {layout}, expected at most ep{MOST_LED} of gpu")

    @model_validator(mode="after")
    def _node(self) -> ServeConfig:
        if self.node_rank >= self.nodes:
            raise ValueError(f"node-rank: got {self.node_rank}, expected it below --nodes {self.nodes}")
        if self.nodes > Layout.parse(self.layout).num_shards:
            raise ValueError(f"nodes: got {self.nodes}, but layout {self.layout} has fewer shards")
        if self.node_rank and not self.controller:
            raise ValueError("controller: a node of rank above 0 needs --controller HOST:PORT (node 0's --listen)")
        return self

    @model_validator(mode="after")
    def _tls(self) -> ServeConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert: got one of --tls-cert and --tls-key, expected both or neither")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError(
                "tls-ca: got none with --tls-cert, expected who signed it: by that the server's own processes know it"
            )
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls-client-ca: got one without --tls-cert, expected both")
        return self

    @model_validator(mode="after")
    def _ports(self) -> ServeConfig:
        span = self.data_ports.span()
        if span and span[-1] > HIGHEST:
            raise ValueError(
                f"--data-port-base: got {span[0]}, expected at most {HIGHEST + 1 - len(span)}: a server of "
                f"{self.layout} may take {len(span)} ports from it on"
            )
        if not self.node_rank and self.http.meets(self.listen):
            raise ValueError(f"--http: got {self.http}, expected another port than that of --listen {self.listen}")
        own = {"--http": self.http} | ({} if self.node_rank else {"--listen": self.listen})
        for flag, address in own.items():
            if address.port in span:
                raise ValueError(
                    f"{flag}: got {address}, expected no port of --data-port-base {span[0]}, which is {span[0]} to "
                    f"{span[-1]} for {self.layout}: choose another port, or another base"
                )
        return self

    @property
    def data_ports(self) -> DataPorts:
        """Which data port is whose."""
        return DataPorts(self.data_port_base, Layout.parse(self.layout))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come as init; `load` puts the file below the environment."""
        return init_settings, env_settings


class ProcessConfig(ServeConfig):
    """What a node tells the processes that it starts: its own settings, and what it found out."""

    spec_json: str  # of the base model
    bind_host: str  # where shards listen; `advertise` is where others reach them, `controller` is rank 0's also there
    run_dir: Path  # of the node's sockets
    shard: int = -1  # of a shard process
    secret: str = Field(repr=False)  # that its shards show to the controller
    restarted: bool = False  # in the place of one that died

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What the node says, and nothing of the environment."""
        return (init_settings,)

    @property
    def local_shards(self) -> range:
        """The shards of this node."""
        return share(Layout.parse(self.layout).num_shards, self.nodes, self.node_rank)


def load(flags: dict[str, Any], file: Path | None = None) -> ServeConfig:
    """Merge the sources; `flags` holds only what was given. Raises ConfigError naming the setting."""
    below = _read(file) if file is not None else {}

    class WithFile(ServeConfig):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            given = ServeConfig.settings_customise_sources(settings_cls, *sources, **named)
            return *given, InitSettingsSource(settings_cls, below)

    try:
        return WithFile(**flags)
    except ValidationError as error:
        problems = "; ".join(_describe(dict(problem)) for problem in error.errors())
        raise ConfigError(problems) from None
    except SettingsError as error:
        raise ConfigError(f"environment: {error}") from None


def _describe(problem: dict[str, Any]) -> str:
    name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
    if problem["type"] == "missing":
        return f"--{name}: missing; give the flag, LORA_SERVER_{name.replace('-', '_').upper()} or a --config file"
    if problem["type"] == "extra_forbidden":
        return f"{name}: no such setting"
    text = str(problem["msg"]).removeprefix("Value error, ")
    if "got " not in text:
        text = f"{text}, got {problem['input']!r}"
    return f"--{name}: {text}" if name else text


def _read(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {file}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {file}: got a {type(values).__name__}, expected a mapping of settings")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
