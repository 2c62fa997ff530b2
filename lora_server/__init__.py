"""lora-server: LoRA adapters live and run on their own shards; engines stay LoRA-free.

spec, placement, errors, address, config   leaves: what a model, a layout, an error, a node's settings are
slo                                        and an SLO class
ports, installed, units, histogram         leaves too: data ports; checks of the installation; numbers
per_tenant                                 and counters by tenant
host_memory                                and available memory
clock, timings                             time, injected, and every duration that is a policy
wire/ transport/ device/                   what travels, and how: by a host, and between GPUs
adapters/ sources/ memory/ shard/          from files to weights to deltas
merge/ merged                              an adapter in the base weights: written offline, and its record
control/ access/ registry/ daemon/         the control plane: adapters, tokens, the database; and the processes
logs, telemetry                            lines and spans of all processes
cli/ flags, terminal, doctor/              the command                     demo/   try it
"""

__version__ = "0.1.0"
