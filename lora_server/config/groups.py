"""The groups and the order of settings in `serve --help` and docs/configuration.md."""

from __future__ import annotations

ESSENTIAL = frozenset({  # what `serve --help` shows; `--help-all` shows all of them
    "base_model", "layout", "device", "dtype", "device_pool", "adapters", "watch", "data_dir",
    "listen", "http", "insecure", "nodes", "node_rank", "controller",
})  # fmt: skip
GROUPS = {
    "Model and layout": ("base_model", "layout", "device", "dtype"),
    "Adapters": (
        "adapters", "watch", "require_all_adapters", "adapter_root", "allow_source", "resolve", "data_dir", "registry",
        "no_copy", "classes",
    ),
    "Memory": (
        "device_pool", "host_pool", "disk_cache", "disk_cache_size", "eviction", "preload", "max_active_adapters",
        "host_link_gbps",
    ),
    "Addresses and access": (
        "listen", "http", "events", "insecure", "require_tokens", "tls_cert", "tls_key", "tls_ca", "tls_client_ca",
        "tls_name", "data_port_base", "grpc_reflection", "lease_seconds", "clients_per_token",
    ),
    "Several nodes": (
        "nodes", "node_rank", "controller", "controller_seconds", "launcher", "standby", "join_token_file", "advertise",
        "replicas", "failover_ms",
    ),
    "Steps": (
        "max_step_rows", "slots", "threads", "wire", "coordination", "gpu_transport", "nvshmem_clients",
    ),
    "Logs and traces": ("log_format", "otlp_endpoint"),
}  # fmt: skip
