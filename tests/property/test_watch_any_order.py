"""Any sequence of file operations, removals by hand and restarts, against the slow and obvious model of the watcher."""

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.support.followed import SETTLE, Followed, make_contents

NAMES, KINDS = st.sampled_from(["law", "code"]), st.sampled_from(["v1", "v2", "dora", "half"])


class Model:
    """Every poll is remembered: content (kind, number) by name, with the time. A restart forgets them."""

    def __init__(self):
        self.polls, self.judged, self.served, self.refused, self.mine = [], {}, {}, set(), set()

    def poll(self, now, content):
        self.polls.append((now, dict(content)))
        for name in {*content, *self.judged, *self.mine}:
            current, since = content.get(name), now
            for then, was in reversed(self.polls):
                if was.get(name) != current:
                    break
                since = then
            if now - since < SETTLE or self.judged.get(name) == current:
                continue
            self.judge(name, current)

    def judge(self, name, current):
        by_hand = name in self.served and name not in self.mine
        self.refused.discard(name)
        if current is None:
            self.judged.pop(name, None)
            if not by_hand:
                self.served.pop(name, None)
                self.mine.discard(name)
            return
        self.judged[name] = current
        if by_hand or current[0] in ("dora", "half"):
            self.refused.add(name)
        else:
            self.served[name] = current[0]
            self.mine.add(name)

    def remove(self, name):
        self.served.pop(name, None)
        self.mine.discard(name)
        self.refused.discard(name)


class Machine(stateful.RuleBasedStateMachine):
    contents: dict[str, Path]

    @initialize()
    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        self.followed, self.model = Followed(Path(self.folder.name), self.contents), Model()
        self.content, self.numbers, self.away = {}, itertools.count(), None
        self.known_to_be_there = False  # a poll of this controller has seen the directory

    def teardown(self):
        self.followed.close()
        self.folder.cleanup()

    @precondition(lambda self: not self.away)
    @rule(name=NAMES, kind=KINDS, link=st.booleans(), settles=st.booleans())
    def put(self, name, kind, link, settles):
        (self.followed.link if link else self.followed.put)(name, kind)
        number = f"link to {kind}" if link else next(self.numbers)  # back at the same files is no change
        self.content[name] = (kind, number)
        for _ in range(2 * settles):
            self.look(SETTLE)

    @precondition(lambda self: not self.away)
    @rule(name=NAMES)
    def delete(self, name):
        self.followed.delete(name)
        self.content.pop(name, None)

    @rule(seconds=st.sampled_from([0.5, SETTLE]), times=st.integers(1, 3))
    def looks(self, seconds, times):
        for _ in range(times):
            self.look(seconds)

    @precondition(lambda self: self.model.served or self.model.refused)
    @rule(data=st.data())
    def remove_by_hand(self, data):
        name = data.draw(st.sampled_from(sorted({*self.model.served, *self.model.refused})))
        self.followed.adapters.rollout.remove(name)
        self.model.remove(name)

    @rule(name=NAMES, kind=st.sampled_from(["v1", "v2"]))
    def add_by_hand(self, name, kind):
        if name not in self.model.served:
            self.followed.adapters.rollout.register(name, str(self.contents[kind]))
            self.model.served[name] = kind
            self.model.refused.discard(name)
            self.model.judged.pop(name, None)  # that there are two is said once more

    @rule()
    def unmount_or_mount(self):
        directory = self.followed.directory
        if self.away:
            directory.rmdir()
            self.away = self.away.rename(directory) and None
        else:
            self.away = directory.rename(directory.parent / "away")
            directory.mkdir()

    @rule()
    def restart(self):
        handles = [one.record.handle for one in self.followed.adapters.listings.all()]
        self.followed.restart()
        assert [one.record.handle for one in self.followed.adapters.listings.all()] == handles
        self.model.polls, self.known_to_be_there = [], False

    def look(self, seconds):
        self.followed.now += seconds
        self.followed.look()
        lost = self.away if self.known_to_be_there else not self.content or self.away
        if not (lost and (self.model.judged or self.model.mine)):
            self.model.poll(self.followed.now, {} if self.away else self.content)
            self.known_to_be_there = not self.away

    @invariant()
    def it_is_as_the_model_says(self):
        assert self.followed.served() == self.model.served
        assert set(self.followed.refused()) == self.model.refused


@pytest.fixture(scope="module")
def contents(tmp_path_factory, tiny_adapters):
    return make_contents(tmp_path_factory.mktemp("contents"), {"v1": tiny_adapters["all"], "v2": tiny_adapters["down"]})


def test_a_watched_directory_equals_the_model(contents):
    Machine.contents = contents
    limits = settings(max_examples=25, stateful_step_count=40, deadline=None)
    stateful.run_state_machine_as_test(Machine, settings=limits)
