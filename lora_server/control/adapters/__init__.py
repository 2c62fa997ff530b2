"""Adapters: what there is, by name, and how names change.

server_adapters   puts together:              records        one version of an adapter
catalog    names, versions, refusals, and what of them is kept for good
changes    the steps of a change            rollout          add, update, rollback, remove, pin
sources:   directory (watch), peers, resolver; restart takes over from an earlier controller
refusals   what is not served, or was not updated, and why
files      what an adapter is opened by     allowed          where it may come from
listings   what users see                   places           the order of a listing
"""
