# SPDX-License-Identifier: Apache-2.0
"""Facts go in once, whole, and come out as they went in."""

from __future__ import annotations

import sqlite3
import struct
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_suite.config.errors import ConfigError
from lora_suite.history.blob import pack, unpack
from lora_suite.history.facts import Trace, utc
from lora_suite.history.schema import USER_VERSION
from lora_suite.history.store import Store
from lora_suite.plan.metric_names import STEP_TIME
from tests.history.helpers import pair, run, session

TRACE = Trace(steps=[1, 2, 3], values=[0.5, 0.25, 0.125])


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    with Store(tmp_path / "history.db", create=True) as opened:
        yield opened


def full_session(night=3):
    """A suite run with everything that one can hold."""
    runs = [
        run(
            night,
            0.1,
            pair="fsdp2",
            arm="lora",
            seconds=12.5,
            health=["power cap"],
            traces={STEP_TIME: TRACE},
        ),
        run(night, 0.2, repeat=2, run_id="other", environment="env-b", state="FAIL"),
        run(night, 0.2, repeat=3, run_id="", state="MISSING", values={}, environment=""),
    ]
    return session(night, runs, [pair([0.7, 0.8])])


def test_a_suite_run_comes_out_as_it_went_in(store):
    fact = full_session()
    assert store.add(fact)
    assert store.session(fact.id) == fact
    assert store.session(fact.id[:6]) == fact


def test_what_is_there_is_left_alone(store):
    fact = full_session()
    store.add(fact)
    moved = fact.model_copy(update={"folder": "elsewhere", "exit_code": 1})
    assert moved.id == fact.id
    assert not store.add(moved)
    assert store.session(fact.id) == fact


def test_other_runs_are_another_suite_run():
    fact = full_session()
    other = fact.model_copy(update={"runs": [run(3, 0.1, run_id="another")]})
    assert fact.id != other.id


def test_a_suite_run_goes_in_whole_or_not_at_all(store):
    twice = session(1, [run(1, 0.1), run(1, 0.2)])
    with pytest.raises(ConfigError, match="UNIQUE"):
        store.add(twice)
    assert store.sessions() == []
    assert store.query("SELECT count(*) FROM summary") == [(0,)]


def test_an_id_that_several_have_or_none_has_is_refused(store):
    store.add(full_session(1))
    store.add(full_session(2))
    with pytest.raises(ConfigError, match="2 suite runs have an id that begins with ''"):
        store.session("")
    with pytest.raises(ConfigError, match="no suite runs"):
        store.session("zz")


def test_pruning_drops_old_steps_and_nothing_else(store):
    old, new = (
        full_session().model_copy(update={"started": utc((datetime.now(UTC) - timedelta(days)).isoformat())})
        for days in (40, 5)
    )
    store.add(old)
    store.add(new)
    assert store.prune(keep_days=30) == 1
    assert store.session(new.id) == new
    kept = store.session(old.id)
    assert kept.runs[0].traces == {}
    assert kept.runs[0].values == old.runs[0].values
    assert kept.pairs == old.pairs


def test_a_file_that_is_no_store_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a database, but long enough to be looked at" * 50)
    with pytest.raises(ConfigError, match="cannot be used as a history"):
        Store(tmp_path / "text")
    with pytest.raises(ConfigError, match="no history here"):
        Store(tmp_path / "absent.db")
    assert not (tmp_path / "absent.db").exists()


def test_tables_of_others_and_of_newer_releases_are_refused(tmp_path):
    for name, statement in (
        ("newer.db", f"PRAGMA user_version = {USER_VERSION + 1}"),
        ("other.db", "CREATE TABLE theirs(x)"),
    ):
        with sqlite3.connect(tmp_path / name) as connection:
            connection.execute(statement)
        with pytest.raises(ConfigError, match="its tables have version"):
            Store(tmp_path / name)


def test_a_store_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another file with --db"):
        Store(tmp_path / "file" / "history.db", create=True)


def test_even_steps_take_four_bytes_a_value():
    assert len(pack(Trace(steps=list(range(10, 60)), values=[1.0] * 50))) == 8 + 4 * 50
    assert pack(TRACE) == struct.pack("<iifff", 1, 1, 0.5, 0.25, 0.125)


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=30, unique=True).map(sorted),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=30, max_size=30),
)
def test_any_steps_come_back(steps, values):
    trace = Trace(steps=steps, values=values[: len(steps)])
    assert unpack(pack(trace)) == trace
