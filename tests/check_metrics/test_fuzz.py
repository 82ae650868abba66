# SPDX-License-Identifier: Apache-2.0
"""A short run of the parser's fuzz target; `make soak` runs it for long."""

import pytest

from tests.check_metrics import fuzz_parser


def test_fuzz_parser() -> None:
    tried, accepted = fuzz_parser.fuzz(seconds=2.0, seed=1)
    assert tried > 200
    assert accepted > 5


def test_the_fuzz_target_reports_what_it_finds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(text: str) -> None:
        raise KeyError(text)

    monkeypatch.setattr(fuzz_parser, "parse", broken)
    with pytest.raises(KeyError):
        fuzz_parser.fuzz(seconds=2.0, seed=1)
    assert "seed 1, text 0: " in capsys.readouterr().err
