"""Shards and the catalog: what each shard was told, what it has, and what it loads before a request asks.

shard_sync   the commands about adapters, in order       residency   what shards report that they have
prewarm      loads into idle memory                      sizes       bytes that adapters take, and that pools have
spread       which shards know which adapters
"""
