"""Our lines in vLLM's log: on its logger, with the place in our code; and not where structlog was configured before."""

import logging

import pytest
import structlog

from client_connector.vllm.logs import NAME, join_vllms
from lora_server.logs import Repeats


@pytest.fixture
def records():
    """What vLLM's handler gets, from a logger at INFO."""
    logger, found = logging.getLogger(NAME), []
    handler = logging.Handler()
    handler.emit = found.append
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    structlog.reset_defaults()
    if before is not None:
        structlog.configure(**before)


def test_lines_go_to_vllms_logger(records):
    join_vllms()
    log = structlog.get_logger()
    log.debug("nobody asked")
    log.info("attached", server="127.0.0.1:7400", adapters=2, error="two words")
    Repeats(log.warning)("key", "failed")
    try:
        raise ValueError("100 %s")
    except ValueError:
        log.exception("broke")
    texts = [record.getMessage() for record in records]
    assert texts[:2] == ["attached server=127.0.0.1:7400 adapters=2 error='two words'", "failed"]
    assert texts[2].startswith("broke\nTraceback") and texts[2].endswith("ValueError: 100 %s")
    assert [record.levelname for record in records] == ["INFO", "WARNING", "ERROR"]
    assert {record.filename for record in records} == {"test_vllm_logs.py"}, "not ours or structlog's own helpers"


def test_an_application_that_configured_structlog_keeps_its_log(records):
    own = []
    structlog.configure(processors=[lambda _, __, said: own.append(said) or (_ for _ in ()).throw(structlog.DropEvent)])
    join_vllms()
    structlog.get_logger().info("attached")
    assert own and not records
