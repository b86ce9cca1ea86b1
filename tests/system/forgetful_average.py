"""own_everything.py with a bug: a resumed run does not get the average back."""

import llmtrain as lt
from tests.system import own_everything


class ForgetfulAverage(lt.WeightAverage):
    def load_state_dict(self, state) -> None:
        pass


def main(argv=None) -> object:
    return own_everything.main(argv, average=ForgetfulAverage)


if __name__ == "__main__":
    lt.launch(main)
