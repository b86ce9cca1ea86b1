"""Started by test_finetune.py on one and on two ranks: train a model of each family for three steps.

`family_ranks.py FILE FAMILIES` writes the losses and gradient norms of each family. It fails if the ranks do
not have the same weights.
"""

import json
import sys
from pathlib import Path

from llmtrain import launch
from llmtrain.launching.accelerator import start_accelerator
from tests.system.sharded_ranks import Case, build_model, train


def main() -> None:
    accelerator = start_accelerator()
    families = {}
    for family in sys.argv[2:]:
        case = Case.parse(f"{family}-packed/2")
        bundle = build_model(case, accelerator, bases=Path())
        _, results = train(case, accelerator, bundle, steps=3)
        families[family] = {"losses": results["losses"], "norms": results["grad_norms"]}
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(families))


if __name__ == "__main__":
    launch(main)
