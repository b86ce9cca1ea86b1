"""Seeds of different purposes start different random numbers, also in torch's 32-bit generator."""

import pytest
import torch

from llmtrain.seeds import key_of, seed_of


@pytest.mark.parametrize(
    ("numbers", "key"),
    [
        ([0], 16294208416658607535),
        ([0, 0], 12035550249420947055),
        ([0, 1], 3069472533636442495),
        ([7, 3], 17670481865470212032),
        ([-1], 16490336266968443936),
    ],
)
def test_keys_never_change_between_versions(numbers, key):
    assert key_of(*numbers) == key


def test_whatever_a_seed_is_made_of_starts_other_numbers_of_torch():
    """Torch's CPU generator reads the lower 32 bits, so it is the judge."""
    drawn = set()
    seeds = (0, 1, 2**31, 2**32, 2**32 + 1, 2**62)
    for seed in seeds:
        for name in ("layers.0.q_proj", "layers.1.q_proj", "prompt"):
            for number in (0, 1, 2**32):
                generator = torch.Generator().manual_seed(seed_of(seed, name, number))
                drawn.add(float(torch.rand((), generator=generator, dtype=torch.float64)))

    assert len(drawn) == len(seeds) * 3 * 3
