# SPDX-License-Identifier: Apache-2.0
"""Where metrics go: metrics.json, TensorBoard event files, Weights & Biases."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from lora_suite.config.schema import WandbLogger
from lora_suite.launch.record import write_json_atomically

SAMPLED = "ray/"
"""Prefix of metrics that are keyed by seconds since the start, not by step."""

_WANDB_SECONDS = 20.0
_REACH_SECONDS = 3.0


class JsonSink:
    """metrics.json: ``{metric: {step: value}}``, null where a value was not finite.

    keep_until: continue what the file holds up to that step (a resumed run), and forget later steps; None
    starts anew, so that no reader can take an earlier run's file for this one's.
    """

    def __init__(self, path: Path, keep_until: int | None = None) -> None:
        self._path = path
        self._series: dict[str, dict[str, float | None]] = {}
        if keep_until is not None and path.exists():
            self._series = _until(json.loads(path.read_text(encoding="utf-8")), keep_until)
        self.flush()

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Keep the values; `flush` writes them."""
        for name, value in values.items():
            self._series.setdefault(name, {})[str(step)] = value

    def flush(self) -> None:
        """Replace the file."""
        write_json_atomically(self._path, self._series)

    def close(self) -> None:
        """Replace the file a last time."""
        self.flush()


def _until(series: dict[str, dict[str, float | None]], step: int) -> dict[str, dict[str, float | None]]:
    """Steps up to `step`; sampled metrics start anew, because their seconds do."""
    kept = {
        name: {key: value for key, value in values.items() if int(key) <= step}
        for name, values in series.items()
        if not name.startswith(SAMPLED)
    }
    return {name: values for name, values in kept.items() if values}


class TensorBoardSink:
    """Event files, written with tensorboard's own writer.

    keep_until: as for `JsonSink`; readers then drop what earlier files hold of later steps.
    """

    def __init__(self, folder: Path, keep_until: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        if keep_until is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=keep_until + 1, session_log=start))

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add one event with all finite values."""
        summary = self._summary(
            value=[
                self._summary.Value(tag=name, simple_value=value)
                for name, value in values.items()
                if value is not None
            ]
        )
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Hand buffered events to the file."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandbSink:
    """Weights & Biases. It never asks, never waits long and never fails a run: problems are warnings.

    Without a key or without a way to the server it works offline, from the start or when the server refuses;
    WANDB_MODE, where set, decides alone. Steps are a metric of their own, `step`: wandb drops values whose
    step is not above its own count, which sampled metrics would advance.

    group: of the run; where the environment names one (WANDB_RUN_GROUP), that. arm: which arm of a pair it is
    (``lora``, ``full``), its job type and, beside those of WANDB_TAGS, a tag. link: address of the run, or
    the folder of its offline files relative to `folder`; empty where wandb did not start.
    """

    def __init__(
        self, config: WandbLogger, folder: Path, recipe: Mapping[str, Any], *, group: str, arm: str
    ) -> None:
        self.link = ""
        self._run: Any = None
        try:
            import wandb
        except ImportError:
            _warn("wandb is not installed (pip install 'lora-suite[wandb]'); it gets no metrics")
            return
        self._error: type[Exception] = wandb.Error
        for mode in dict.fromkeys((_wandb_mode(), "offline")):
            try:
                self._run = wandb.init(
                    project=config.project,
                    name=config.name,
                    group=os.environ.get("WANDB_RUN_GROUP") or group,
                    job_type=arm,
                    tags=_tags(arm),
                    dir=str(folder),
                    config=dict(recipe),
                    mode=mode,
                    settings=_quiet(wandb.Settings),
                )
                self._run.define_metric("*", step_metric="step")
                self._run.define_metric(f"{SAMPLED}*", step_metric="seconds")
                break
            except (wandb.Error, OSError) as error:
                _warn(f"wandb did not start {mode} ({error})")
                self._run = None
        self.link = self._find(folder)

    def _find(self, folder: Path) -> str:
        if self._run is None or self._run.settings.mode == "disabled":
            return ""
        if self._run.settings.mode in ("online", "shared"):
            return str(self._run.url)
        written = Path(self._run.settings.sync_dir).resolve()
        inside = written.is_relative_to(folder.resolve())
        return str(written.relative_to(folder.resolve()) if inside else written)

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """Send the finite values."""
        if self._run is None:
            return
        finite = {name: value for name, value in values.items() if value is not None}
        axis = "seconds" if any(name.startswith(SAMPLED) for name in finite) else "step"
        try:
            self._run.log({**finite, axis: step})
        except (self._error, OSError) as error:
            self._give_up(error)

    def summarise(self, values: Mapping[str, str | float]) -> None:
        """Set figures of the run as a whole."""
        if self._run is None:
            return
        try:
            self._run.summary.update(dict(values))
        except (self._error, OSError) as error:
            self._give_up(error)

    def flush(self) -> None:
        """Nothing to do: wandb writes by itself."""

    def close(self) -> None:
        """End the wandb run."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except (self._error, OSError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        _warn(f"wandb failed ({error}); it gets no further metrics")
        self._run = None


def _tags(arm: str) -> list[str]:
    asked = (tag.strip() for tag in os.environ.get("WANDB_TAGS", "").split(","))
    return list(dict.fromkeys(filter(None, (arm, *asked))))


def _quiet(settings: Any) -> Any:
    """Settings with which wandb waits for nothing long, and neither samples the machine nor takes the output.

    What it would sample costs the machine that is measured; `ray/…` and `memory/…` say it already.
    """
    return settings(
        silent=True,
        console="off",
        disable_git=True,
        x_disable_stats=True,
        init_timeout=_WANDB_SECONDS,
        login_timeout=_WANDB_SECONDS,
        finish_timeout=_WANDB_SECONDS,
    )


def _wandb_mode() -> Any:
    """The mode to start wandb in, so that it neither asks for a key nor waits for a server."""
    chosen = os.environ.get("WANDB_MODE")
    if chosen:
        return chosen
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    if not os.environ.get("WANDB_API_KEY") and not _netrc_names(server.hostname or ""):
        return "offline"
    proxy = getproxies().get(server.scheme)
    asked = server if proxy is None or proxy_bypass(server.hostname or "") else urlsplit(proxy)
    port = asked.port or {"http": 80}.get(asked.scheme, 443)
    try:
        socket.create_connection((asked.hostname or "", port), timeout=_REACH_SECONDS).close()
    except OSError:
        return "offline"
    return "online"


def _netrc_names(host: str) -> bool:
    path = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    try:
        return host in path.read_text(encoding="utf-8")
    except OSError:
        return False


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
