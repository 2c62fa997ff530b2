"""Lines that others can cause at will: the first at once, the rest counted, none lost from the count."""

from hypothesis import given
from hypothesis import strategies as st

from lora_server.logs import Repeats


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 4)), max_size=200))
def test_every_line_is_written_or_counted(calls):
    now, lines, written = [0.0], [], {}
    repeats = Repeats(lambda event, **fields: lines.append((event, fields)), 10.0, lambda: now[0])
    for key, pause in calls:
        now[0] += pause
        repeats(key, f"event-{key}", number=now[0])
    now[0] += 100
    repeats.flush()
    for event, fields in lines:
        name = event.removesuffix(" (again)")
        written[name] = written.get(name, 0) + fields.get("times", 1)
    asked = {}
    for key, _ in calls:
        asked[f"event-{key}"] = asked.get(f"event-{key}", 0) + 1
    assert written == asked
    assert len(lines) <= 4 * (2 + now[0] / 10.0)


def test_a_traceback_is_written_and_not_kept():
    lines = []
    repeats = Repeats(lambda event, **fields: lines.append((event, fields)), 10.0, lambda: 0.0)
    repeats("key", "failed", exc_info=ValueError("one"))
    repeats("key", "failed", exc_info=ValueError("two"))
    assert "exc_info" in lines[0][1] and not any("exc_info" in one.fields for one in repeats._muted.values())
