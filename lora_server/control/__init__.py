"""The control plane: gRPC services, leases, registry, health and metrics over HTTP."""
