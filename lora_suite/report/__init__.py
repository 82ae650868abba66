# SPDX-License-Identifier: Apache-2.0
"""Pure renderers of the Verdict model: terminal, page, Markdown, JUnit, annotations."""
