"""The tutorials whose commands run in tests, and the recipes that commands of the pages start."""

from recipes import finetune, gpt, preference
from tests.launching import FINETUNE, GPT, PREFERENCE

# The path of a recipe, as in a command -> its module.
RECIPES = {GPT: gpt, FINETUNE: finetune, PREFERENCE: preference}

# The commands of these pages run one after the other in one folder. The sh blocks of the other
# tutorials need several machines, kill their runs at a certain step, or are timed lessons.
JOURNEYS = {"pretrain": ["pretrain.md"], "align": ["finetune.md", "align.md"]}
