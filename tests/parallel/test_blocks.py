"""The repeated blocks of a model are found."""

import torch
from torch import nn

from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.parallel.blocks import block_classes, blocks_of


def test_blocks_are_the_classes_that_a_model_declares_and_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Bilinear(2, 2, 2))
    model._no_split_modules = ["Bilinear", "Absent"]

    assert block_classes(model) == {"Bilinear"}


def test_the_blocks_of_a_gpt_are_its_layers() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=8, block_size=8), 16)

    assert block_classes(model) == {"Block"}
    assert len(blocks_of(model)) == 2


def test_lists_inside_of_layers_are_no_blocks() -> None:
    """There are more experts than layers."""
    experts = nn.ModuleList(nn.Bilinear(1, 1, 1) for _ in range(9))
    layers = nn.ModuleList(nn.ModuleDict({"experts": experts}) for _ in range(2))

    assert block_classes(nn.ModuleDict({"layers": layers})) == {"ModuleDict"}


def test_a_model_without_lists_has_no_blocks() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    assert block_classes(model) == set()
    assert blocks_of(model) == []
