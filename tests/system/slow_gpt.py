"""recipes/gpt.py with a pause after each step, whose seconds stand in the file `pause`.

Tests of Slurm submit it, so that they can act while the run trains.
"""

import functools
import time
from pathlib import Path

import llmtrain as lt
from recipes import gpt


class Pause(lt.Callback):
    fingerprint = None

    def on_step_end(self, *_: object) -> None:
        time.sleep(float(Path("pause").read_text()))


if __name__ == "__main__":
    lt.open_run = functools.partial(lt.open_run, callbacks=[Pause()])
    lt.launch(gpt.main)
