"""Train a GPT whose ranks vote to stop before step 3, by the variable VOTES, such as "save finish"."""

import os

from llmtrain.recipes import gpt

import llmtrain as lt


class Votes(lt.Callback):
    """Votes as the variable says: once, and each rank on its own."""

    def setup(self, training):
        self._training = training

    def wants_to_stop(self):
        votes = os.environ["VOTES"].split()
        return self._training.step == 2 and votes[int(os.environ["RANK"])].replace("none", "")


def main(argv=None):
    settings = lt.parse(gpt.DEFAULTS, argv, __doc__)
    return lt.fit(settings, gpt.tokenized(settings), gpt.build, callbacks=[Votes()])


if __name__ == "__main__":
    lt.launch(main)
