# SPDX-License-Identifier: Apache-2.0
"""`python -m check_metrics`."""

from check_metrics.cli import main

if __name__ == "__main__":
    main()
