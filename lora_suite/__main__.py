# SPDX-License-Identifier: Apache-2.0
"""`python -m lora_suite` is `lora-suite`."""

from __future__ import annotations

from lora_suite.cli import main

if __name__ == "__main__":
    main()
