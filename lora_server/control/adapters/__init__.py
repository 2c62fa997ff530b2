"""Adapters: what there is, by name.

adapters      registered, removed                   registry    what there is
  updates     another version, a pin (attempts)       origins   where they come from (allowed)
  reconciled  as the ledger has them                  resolver  names that nobody registered
  told        what shards were told of them           refusals  what is not served, and why
  held        what clients hold of them
followed      what is taken from the ledger         watch       a directory that is followed
  readings    what of it need not be read
"""
