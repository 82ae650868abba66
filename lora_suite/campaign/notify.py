# SPDX-License-Identifier: Apache-2.0
"""Tells a webhook what became of a night. Whatever happens there is said, and changes no verdict."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from lora_suite.judge.night import NightVerdict
from lora_suite.plan.nightly_file import WebhookEntry
from lora_suite.report.night import message


def notify(night: NightVerdict, webhook: WebhookEntry, environment: Mapping[str, str]) -> str:
    """Send the summary of a night, if it is to be sent; return why it did not arrive, else an empty text.

    The address is a secret, so no text names more of it than its host.
    """
    if webhook.when == "problem" and night.exit_code == 0:
        return ""
    address = environment.get(webhook.url_env, "")
    if not address:
        return f"the webhook was not told: {webhook.url_env} is not set"
    problem = _post(address, message(night, webhook.link), webhook.timeout_seconds)
    return f"the webhook was not told: {problem}" if problem else ""


def _post(address: str, content: Mapping[str, Any], seconds: float) -> str:
    """Post JSON; return why that failed, else an empty text. Never waits longer than `seconds`.

    A server that sends a byte now and then would outlast the time-out of its socket, so the time is taken
    outside of the thread that waits for it.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "its address does not begin with http:// or https://"
    outcome = [f"{parts.hostname} did not answer within {seconds:g} s"]

    def send() -> None:
        request = urllib.request.Request(
            address,
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds):
                outcome[0] = ""
        except urllib.error.HTTPError as error:
            outcome[0] = f"{parts.hostname} answered {error.code}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome[0] = f"{parts.hostname}: {getattr(error, 'reason', '') or type(error).__name__}"

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(seconds)
    return outcome[0]
