# SPDX-License-Identifier: Apache-2.0
"""Recipe YAML to a resolved, typed `Recipe`: inheritance, overrides, schema."""
