"""Where a controller may be killed in an update: methods of its adapters, in the order of an update."""

STAGES = [  # of an update
    # what is the last to be begun, or done; whether the new version serves then
    ("_record", False, False),  # it was read
    ("_load_beside", False, False),
    ("_load_beside", True, False),  # shards load it
    ("_keep_replaced", False, False),  # shards have it
    ("_keep_replaced", True, True),  # and it is kept
    ("_take_back_refusal", False, True),  # and it is listed
    ("_collect", False, True),  # and shards were told
]
