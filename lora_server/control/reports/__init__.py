"""What a server tells of itself.

status     all of it, for who asks                  metrics       what Prometheus asks for (build)
overview   what the page shows                        metrics_disk  of the disk cache
listing    adapters, a page at a time
"""
