# SPDX-License-Identifier: Apache-2.0
"""Checks thresholds on the metrics of training runs: `mean(data["timing/train/total_step_time"], 2) < 30`.

The command line is in `check_metrics.cli`; from Python: `parse` a check once, `load_metrics` of each arm,
`evaluate`.
"""

from check_metrics.errors import ExpressionError, MetricsError
from check_metrics.evaluation import Comparison
from check_metrics.language import parse
from check_metrics.loading import load_metrics
from check_metrics.series import Series, is_per_step
from check_metrics.syntax import Expression, PairForm
from check_metrics.verdict import CheckResult, evaluate

__all__ = [
    "CheckResult",
    "Comparison",
    "Expression",
    "ExpressionError",
    "MetricsError",
    "PairForm",
    "Series",
    "evaluate",
    "is_per_step",
    "load_metrics",
    "parse",
]
