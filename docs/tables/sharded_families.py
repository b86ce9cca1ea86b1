"""Run on two ranks by models_table.py: FSDP2 with the model of each family in a folder.

`sharded_families.py FOLDER` reads the step of one process from FOLDER/steps.json, and writes the
cells of FSDP2 to FOLDER/sharded.json.
"""

import json
import sys
from pathlib import Path

from docs.tables.model_trials import Step, try_sharded
from llmtrain import launch
from llmtrain.files import read_object
from llmtrain.launching.accelerator import start_accelerator


def main() -> None:
    folder = Path(sys.argv[1])
    accelerator = start_accelerator()
    cells = {}
    for family, step in read_object(folder / "steps.json").items():
        cells[family] = try_sharded(accelerator, folder / family, Step(*step))
        accelerator.free_memory()
    if accelerator.is_main_process:
        (folder / "sharded.json").write_text(json.dumps(cells))


if __name__ == "__main__":
    launch(main)
