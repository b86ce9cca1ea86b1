"""A state comes back from JSON and tensors as it was, with the same types."""

import json
import math
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.record.checkpoint import (
    STRUCTURE,
    find_fault,
    part_names,
    path_of,
    read_structure,
    tensors_digest,
)
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState, flatten, tensor_names, unflatten
from llmtrain.record.tensor_files import STORABLE_DTYPES, read_tensors
from tests.record.test_checkpoint import Files

VALUES = [
    None,
    True,
    3,
    2**80,
    0.1,
    -0.0,
    math.inf,
    "a string",
    [],
    [1, [None, []], 2.5],
    (1, "two", (3.0,)),
    {3, 1, 2},
    {"mixed", 4, (5, 6)},
    torch.Size([2, 3]),
    {},
    {"a": 1, 2: "b", 2.5: "c", None: "d", True: "e", (1, "x"): "f"},
    OrderedDict([("z", 1), ("a", [2])]),
    torch.tensor(1.5),
    torch.zeros(0, 3),
    torch.arange(6, dtype=torch.uint8).view(2, 3),
    {"a.b": torch.ones(1), "a": {"b": torch.zeros(2)}},
    {0: {"Q": [torch.eye(2), None, torch.eye(3, dtype=torch.bfloat16)], "initialized": {0, 2}}},
]


def assert_same(first: Any, second: Any) -> None:
    """Assert that two values are equal, and have the same types throughout."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert first.shape == second.shape
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert_same([*first], [*second])
        assert_same([*first.values()], [*second.values()])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for item, other in zip(first, second, strict=True):
            assert_same(item, other)
    elif isinstance(
        first, set
    ):  # in any order: the hash of a string is another one in each process
        assert first == second
    else:
        assert repr(first) == repr(second)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_with_the_same_types(value: Any) -> None:
    tree, tensors = flatten(value, "w", "the optimizer")
    tree = json.loads(json.dumps(tree, allow_nan=False))
    assert sorted(tensor_names(tree)) == sorted(tensors)
    assert_same(unflatten(tree, tensors), value)


def test_a_number_that_is_not_a_number_comes_back() -> None:
    tree, _ = flatten({"loss": math.nan}, "", "the optimizer")
    assert math.isnan(unflatten(json.loads(json.dumps(tree, allow_nan=False)), {})["loss"])


def test_tensors_have_readable_names() -> None:
    state = {"exp_avg": torch.ones(1), "GG": [torch.ones(2), None], 0: {"Q": torch.ones(3)}}
    _, tensors = flatten(state, "wte.weight", "the optimizer")
    assert [*tensors] == ["wte.weight.exp_avg", "wte.weight.GG[0]", "wte.weight[0].Q"]


OWN_LIST: list[Any] = []
OWN_LIST.append(OWN_LIST)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"GG": [deque()]}, r"keeps a deque in w\.GG\[0\]"),
        ({"rng": torch.Generator()}, r"keeps a Generator in w\.rng"),
        ({"mean": np.float64(1)}, r"keeps a float64 in w\.mean"),
        ({"hook": len}, r"keeps a builtin_function_or_method in w\.hook"),
        ({torch.ones(1): 1}, "keeps a tensor as a key in w"),
        (
            {"wide": torch.ones(1, dtype=torch.complex128)},
            r"keeps a tensor of torch\.complex128 in w\.wide",
        ),
        ({"sparse": torch.eye(2).to_sparse()}, r"keeps a tensor of torch\.sparse_coo in w\.sparse"),
        (OWN_LIST, "keeps a state that contains itself in w"),
    ],
)
def test_a_type_that_a_checkpoint_cannot_hold_is_named(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"the optimizer SOAP {message}.*, which a checkpoint cann"):
        flatten(value, "w", "the optimizer SOAP")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_holds_states_of_parts_as_they_are_at_that_moment(
    in_background: bool, tmp_path: Path
) -> None:
    average = {dtype: torch.ones(3).to(dtype) for dtype in STORABLE_DTYPES}
    state = {"count": 1, "average": [*average.values()]}
    saver = Saver(tmp_path, Files(), keep=9, in_background=in_background)
    digests = []
    for step in (1, 2, 3):
        tree, tensors = flatten(state, "", "Average")
        part = FlatState({"state": tree}, tensors)
        states = {"optimizer": FlatState({}, {}), "parts/Average": part}
        saver.save(step, {"w": torch.ones(2)}, states, {"step": step})
        if step == 1:
            state["count"] = 2  # training goes on
            average[torch.float32] += 1
    saver.wait()

    for step, count in ((1, 1), (2, 2)):
        path = path_of(tmp_path, step)
        assert find_fault(path) is None
        assert part_names(path) == ["Average"]
        folder = path / "parts" / "Average"
        stored = unflatten(read_structure(folder)["state"], dict(read_tensors(folder)))
        expected = [*average.values()]
        if step == 1:
            expected = [torch.ones(3).to(dtype) for dtype in average]
        assert_same(stored, {"count": count, "average": expected})
    digests = [tensors_digest(path_of(tmp_path, step)) for step in (1, 2, 3)]
    assert digests[0] != digests[1] == digests[2]


def test_a_name_that_another_value_has_gets_a_number() -> None:
    tree, tensors = flatten({"b": torch.ones(1)}, "a", "the optimizer", taken={"a.b", "a.b-2"})
    assert [*tensors] == [*tensor_names(tree)] == ["a.b-3"]


def test_copies_of_tensors_that_are_gone_are_freed(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Files(), keep=9, in_background=True)
    for step in (1, 2, 3):
        states = {"optimizer": FlatState({}, {f"step {step}": torch.ones(2)})}
        saver.save(step, {"w": torch.ones(2)}, states, {"step": step})
    saver.wait()
    assert sorted(name for _, name in saver._host_copies) == ["step 3", "w"]


def test_a_number_of_a_part_changes_the_digest(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Files(), keep=9)
    for step in (1, 2):
        states = {"optimizer": FlatState({}, {}), "parts/A": FlatState({"state": step}, {})}
        saver.save(step, {"w": torch.ones(2)}, states, {"step": step})
    first, second = (tensors_digest(path_of(tmp_path, step)) for step in (1, 2))
    assert first != second


def test_a_damaged_structure_is_noticed(tmp_path: Path) -> None:
    states = {"optimizer": FlatState({}, {})}
    Saver(tmp_path, Files(), keep=9).save(1, {"w": torch.ones(2)}, states, {"step": 1})
    structure = path_of(tmp_path, 1) / "optimizer" / STRUCTURE
    structure.write_text(structure.read_text().replace("1", "1 "))
    assert find_fault(path_of(tmp_path, 1)) == "optimizer/structure.json differs from its hash"
    structure.unlink()
    assert "structure.json is missing" in str(find_fault(path_of(tmp_path, 1)))
