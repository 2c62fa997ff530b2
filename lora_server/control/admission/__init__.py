"""Who may use an adapter now, and who waits.

admission  one queue for all that wait              tally      who used what, for how long
  room     what fits into the pools                 residency  which shard has how much of it
  unasked  what is brought in before anybody asks
  holds    who uses what
"""
