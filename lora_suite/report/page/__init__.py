# SPDX-License-Identifier: Apache-2.0
"""The verdict as one HTML page that needs no network: tables, filters, and charts as inline SVG."""

from lora_suite.report.page.render import render

__all__ = ["render"]
