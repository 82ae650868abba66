# SPDX-License-Identifier: Apache-2.0
"""What the launcher asks this rank to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_suite.config import ConfigError
from lora_suite.config.schema import Recipe
from lora_suite.launch.record import RunDir


@dataclass(frozen=True)
class Job:
    """One training: its case and run id, its recipe (as a plain tree and typed), its run directory."""

    case: str
    run_id: str
    recipe_path: Path
    tree: dict[str, Any]
    recipe: Recipe
    files: RunDir

    @classmethod
    def read(cls, run_dir: Path) -> Job:
        """Read the recipe.json of a run directory; raises ConfigError where there is none."""
        path = run_dir / "recipe.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: {error}; `lora-suite train` writes it before it starts the ranks"
            ) from error
        return cls(
            case=value["case"],
            run_id=value["run_id"],
            recipe_path=Path(value["recipe_path"]),
            tree=value["tree"],
            # Through JSON, because strict types take a list for a tuple only from there.
            recipe=Recipe.model_validate_json(json.dumps(value["tree"])),
            files=RunDir(run_dir),
        )
