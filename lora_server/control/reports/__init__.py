"""Reports of a server's state.

status     the reply to `lora-server status`        metrics       Prometheus metrics (build)
overview   the data of the web page                   metrics_disk  of the disk cache
listing    adapters, a page at a time                metrics_tenant  by tenant
durations  histograms of both
"""
