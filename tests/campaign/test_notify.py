# SPDX-License-Identifier: Apache-2.0
"""The webhook, against a server on this machine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from lora_suite.campaign.notify import notify
from lora_suite.judge.night import NightVerdict, SuiteOutcome
from lora_suite.plan.nightly_file import WebhookEntry


class Server(HTTPServer):
    """Keeps what was posted, and answers with `status`."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def night(code: int = 1) -> NightVerdict:
    suite = SuiteOutcome(
        name="smoke",
        suite="suites/smoke.yaml",
        exit_code=code,
        outcome="FAIL" if code else "PASS",
        counts={"FAIL": 1, "PASS": 8},
        problems=["FAIL fsdp2: lora/full step_time (owner <!channel>): 1.2 & more"],
    )
    return NightVerdict(
        started="2026-03-01T23:30:00", seconds=90, host="h", directory="nights/x", gpu_hours=1, suites=[suite]
    )


def tell(address: str, code: int = 1, **webhook: Any) -> str:
    entry = WebhookEntry(url_env="HOOK", **webhook)
    return notify(night(code), entry, {"HOOK": address})


def test_the_message_has_the_form_that_slack_reads(server: Server) -> None:
    address = f"http://127.0.0.1:{server.server_port}/services/T0/secret"
    assert tell(address, link="https://ci.example/9") == ""
    ((path, kind, content),) = server.got
    assert (path, kind) == ("/services/T0/secret", "application/json")
    assert set(content) == {"text", "blocks"}
    assert content["text"].startswith("lora-suite on h: 0 of 1 suites passed")
    assert "(exit 1)" in content["text"]
    assert [block["type"] for block in content["blocks"]] == ["section", "section"]
    body = content["blocks"][1]["text"]
    assert body["type"] == "mrkdwn"
    assert "*FAIL* smoke: 1 FAIL 8 PASS" in body["text"]
    # What is quoted calls nobody.
    assert "(owner &lt;!channel&gt;): 1.2 &amp; more" in body["text"]
    assert body["text"].endswith("<https://ci.example/9|results>")


def test_a_good_night_is_told_only_where_that_is_asked_for(server: Server) -> None:
    address = f"http://127.0.0.1:{server.server_port}/"
    assert tell(address, code=0) == ""
    assert server.got == []
    assert tell(address, code=0, when="always") == ""
    assert len(server.got) == 1


def test_a_refusal_is_said_without_the_secret(server: Server) -> None:
    server.status = 403
    said = tell(f"http://127.0.0.1:{server.server_port}/services/secret")
    assert said == "the webhook was not told: 127.0.0.1 answered 403"


def test_nobody_there_is_said() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        said = tell(f"http://127.0.0.1:{unused.getsockname()[1]}/secret")
    assert said.startswith("the webhook was not told: 127.0.0.1: ")
    assert "secret" not in said


@pytest.mark.parametrize("address", ["file:///etc/passwd", "hooks.example/secret", "http:///x"])
def test_what_is_no_web_address_is_not_opened(address: str) -> None:
    assert tell(address).endswith("its address does not begin with http:// or https://")


def test_an_address_that_is_not_set_is_said() -> None:
    assert tell("") == "the webhook was not told: HOOK is not set"


def test_a_server_that_dawdles_is_left(tmp_path: Any) -> None:
    """It sends a byte now and then, so that no time-out of the socket ever strikes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        done = threading.Event()

        def dawdle() -> None:
            connection, _ = listening.accept()
            with connection:
                while not done.wait(0.1):
                    try:
                        connection.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=dawdle)
        thread.start()
        began = time.monotonic()
        said = tell(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_seconds=0.5)
        took = time.monotonic() - began
        done.set()
        thread.join()
    assert said == "the webhook was not told: 127.0.0.1 did not answer within 0.5 s"
    assert took < 5.0
