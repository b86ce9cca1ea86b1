"""The GPT recipe, with a mirror that uploads several times a second."""

import llmtrain as lt
from llmtrain.record import mirror
from recipes import gpt

mirror._PAUSE_SECONDS = 0.1

if __name__ == "__main__":
    lt.launch(gpt.main)
