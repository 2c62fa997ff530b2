"""What adapters take by outline, against a table that has a row for each adapter."""

from hypothesis import given
from hypothesis import strategies as st

from lora_server.control.sync.sizes import NO_LIMIT, UNMEASURED, PoolSizes

SHARDS, HANDLES = 3, 6
OUTLINES = ["", "one", "two", "one", "one", ""]  # by handle
CHANGES = st.one_of(
    st.tuples(st.just("set"), st.integers(0, HANDLES - 1), st.integers(0, SHARDS - 1), st.integers(0, 3)),
    st.tuples(st.just("forget"), st.integers(0, HANDLES - 1), st.just(0), st.just(0)),
    st.tuples(st.just("limit"), st.just(0), st.integers(0, SHARDS - 1), st.integers(1, 9)),
)


def alike(handle, known):
    """The adapters that are known and take what this one does."""
    own = OUTLINES[handle]
    return [one for one in known if one == handle or (own and OUTLINES[one] == own)]


@given(changes=st.lists(CHANGES, max_size=30))
def test_sizes_are_those_of_a_row_for_each_adapter(changes):
    sizes, rows, limits = PoolSizes(SHARDS), dict[int, list[int]](), [NO_LIMIT] * SHARDS
    for what, handle, shard, number in changes:
        active = list(range(0, HANDLES, 2))
        before, count = sizes.taken(active), sizes.changes
        if what == "limit":
            sizes.set_capacity(shard, number)
            limits[shard] = number
        elif what == "forget":
            sizes.forget(handle)
            rows.pop(handle, None)
        else:
            sizes.set_outline(handle, OUTLINES[handle])
            if handle not in rows:
                others = [one for one in alike(handle, rows) if one != handle]
                rows[handle] = list(rows[others[0]]) if others else [UNMEASURED] * SHARDS
            sizes.set_size(handle, shard, number)
            for one in alike(handle, rows):
                rows[one][shard] = number
        none = [UNMEASURED] * SHARDS
        for one in range(HANDLES):
            row = rows.get(one, none)
            assert sizes.each([one]).tolist() == [row]
            assert [sizes.of(one, at) for at in range(SHARDS)] == [None if size == UNMEASURED else size for size in row]
            lacking = [at for at in range(SHARDS) if limits[at] != NO_LIMIT and row[at] == UNMEASURED]
            assert sizes.unmeasured([one]) == (lacking[0] if lacking else None)
        taken = [sum(max(0, rows.get(one, none)[at]) for one in active) for at in range(SHARDS)]
        assert sizes.taken(active).tolist() == taken
        measured = all(sizes.unmeasured([one]) is None for one in active if one in rows)
        if what == "set" and measured and (sizes.taken(active) != before).any():
            assert sizes.changes > count, "a sum over sizes is not current any more"
