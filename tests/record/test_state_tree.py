"""A state comes back from JSON and tensors as it was, with the same types."""

import json
import math
import re
from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from llmtrain.errors import UserError
from llmtrain.files import Json
from llmtrain.record.checkpoint import (
    STRUCTURE,
    find_fault,
    part_names,
    path_of,
    read_file,
    state_hashes,
)
from llmtrain.record.saver import Saver
from llmtrain.record.state_tree import FlatState, flatten, unflatten
from llmtrain.record.tensor_files import STORABLE_DTYPES, read_tensors
from tests.record.checkpoint_files import Files

VALUES = [
    None,
    True,
    3,
    2**80,
    0.1,
    -0.0,
    math.inf,
    math.nan,
    "a string",
    [],
    [1, [None, []], 2.5],
    (1, "two", (3.0,)),
    {3, 1, 2},
    {},
    {"a": 1, 2: "b", -1: {"c": None}},
    {"$tensor": 1},
    torch.tensor(1.5),
    torch.zeros(0, 3),
    torch.arange(6, dtype=torch.uint8).view(2, 3),
    {0: {"Q": [torch.eye(2), None, torch.eye(3, dtype=torch.bfloat16)], "initialized": {0, 2}}},
]


def through_json(tree: Json) -> Json:
    return json.loads(json.dumps(tree, allow_nan=False))


def assert_same(actual: Any, expected: Any) -> None:
    """Assert that two values are equal, and have the same types throughout."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    elif isinstance(expected, dict):
        assert_same([*actual], [*expected])
        assert_same([*actual.values()], [*expected.values()])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same(actual_item, expected_item)
    elif isinstance(expected, set):
        assert actual == expected
    else:
        assert repr(actual) == repr(expected)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_with_the_same_types(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = through_json(flatten(value, "w", "the optimizer", tensors))

    assert_same(unflatten(tree, tensors), value)


def test_a_dictionary_of_strings_is_json_and_an_ordered_one_comes_back_as_a_plain_one() -> None:
    state = OrderedDict([("z", 1), ("a", [2, "x"])])

    assert flatten(state, "", "the optimizer", {}) == {"z": 1, "a": [2, "x"]}


def test_tensors_have_readable_names() -> None:
    state = {"exp_avg": torch.ones(1), "GG": [torch.ones(2), None], 0: {"Q": torch.ones(3)}}

    tensors: dict[str, torch.Tensor] = {}
    flatten(state, "wte.weight", "the optimizer", tensors)

    assert [*tensors] == ["wte.weight.exp_avg", "wte.weight.GG[0]", "wte.weight[0].Q"]


def contains_itself() -> dict[str, Any]:
    items: list[Any] = []
    items.append(items)
    return {"a": items}


def test_two_tensors_of_one_name_are_refused() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(UserError, match=r"keeps two tensors by the name w\.a\.b; rename a key"):
        flatten(state, "w", "the optimizer", {})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"GG": [deque()]}, "a deque in w.GG[0]"),
        ({"rng": torch.Generator()}, "a Generator in w.rng"),
        ({"mean": np.float64(1)}, "a float64 in w.mean"),
        ({"hook": len}, "a builtin_function_or_method in w.hook"),
        ({torch.ones(1): 1}, "a dict in w"),
        (contains_itself(), "a list in w.a[0][0]"),
        (
            {"wide": torch.ones(1, dtype=torch.complex128)},
            "a Tensor of torch.complex128 (torch.strided) in w.wide",
        ),
        (
            {"sparse": torch.eye(2).to_sparse()},
            "a Tensor of torch.float32 (torch.sparse_coo) in w.sparse",
        ),
    ],
)
def test_the_error_for_a_value_that_cannot_be_stored_names_it(value: Any, message: str) -> None:
    expected = f"the optimizer SOAP keeps {re.escape(message)}.*, which a checkpoint cann"

    with pytest.raises(UserError, match=expected):
        flatten(value, "w", "the optimizer SOAP", {})


# --- states in checkpoints


def save(saver: Saver, step: int, states: Mapping[str, FlatState]) -> None:
    weights = {"w": torch.ones(2)}
    saver.save(step=step, weights=weights, states=states, state={"step": step})


def read_part(checkpoint: Path, name: str) -> Any:
    folder = checkpoint / "parts" / name
    return unflatten(read_file(folder / STRUCTURE)["state"], dict(read_tensors(folder)))


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_holds_weights_and_the_state_of_a_part_as_they_were_at_its_step(
    in_background: bool, tmp_path: Path
) -> None:
    saver = Saver(tmp_path, Files(), keep=9, in_background=in_background)
    weights = {"w": torch.ones(1000)}
    committed: list[int] = []
    state = {"count": 1, "average": [torch.ones(3).to(dtype) for dtype in STORABLE_DTYPES]}
    expected_states = []
    for step in (1, 2, 3):
        expected_states.append({"count": step, "average": [t.clone() for t in state["average"]]})
        tensors: dict[str, torch.Tensor] = {}
        tree = flatten(state, "", "Average", tensors)
        part = FlatState({"state": tree}, tensors)
        saver.save(
            step=step,
            weights=weights,
            states={"optimizer": FlatState({}, {}), "parts/Average": part},
            state={"step": step},
            on_commit=lambda step=step: committed.append(step),
        )

        weights["w"] += 1  # training goes on
        state["count"] += 1
        for tensor in state["average"]:
            tensor.zero_()
    saver.wait()

    assert committed == [1, 2, 3]
    for step, expected in enumerate(expected_states, start=1):
        checkpoint = path_of(tmp_path, step)
        assert find_fault(checkpoint) is None
        assert part_names(checkpoint) == ["Average"]
        assert_same(read_part(checkpoint, "Average"), expected)
        saved_weights = load_file(checkpoint / "model/model.safetensors")["w"]
        assert saved_weights.unique().tolist() == [step]


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        pytest.param({}, True, id="nothing"),
        pytest.param({"count": 2}, False, id="a number"),
        pytest.param({"average": torch.zeros(2)}, False, id="a tensor"),
    ],
)
def test_the_digest_of_a_checkpoint_covers_the_states_of_parts(
    changed: dict[str, Any], is_same: bool, tmp_path: Path
) -> None:
    saver = Saver(tmp_path, Files(), keep=9)
    state = {"count": 1, "average": torch.ones(2)}
    for step, content in ((1, state), (2, state | changed)):
        tensors: dict[str, torch.Tensor] = {}
        tree = flatten(content, "", "A", tensors)
        part = FlatState({"state": tree}, tensors)
        save(saver, step, {"optimizer": FlatState({}, {}), "parts/A": part})

    first_digest = state_hashes(path_of(tmp_path, 1))
    second_digest = state_hashes(path_of(tmp_path, 2))

    assert (first_digest == second_digest) is is_same


def test_a_background_save_frees_its_copies_of_tensors_that_no_longer_exist(
    tmp_path: Path,
) -> None:
    saver = Saver(tmp_path, Files(), keep=9, in_background=True)

    for step in (1, 2, 3):
        save(saver, step, {"optimizer": FlatState({}, {f"step {step}": torch.ones(2)})})
    saver.wait()

    assert sorted(name for _, name in saver._host_copies) == ["step 3", "w"]


def test_a_changed_or_missing_structure_is_damage(tmp_path: Path) -> None:
    save(Saver(tmp_path, Files(), keep=9), 1, {"optimizer": FlatState({}, {})})
    checkpoint = path_of(tmp_path, 1)
    structure = checkpoint / "optimizer" / STRUCTURE

    structure.write_text(structure.read_text() + " ")
    assert find_fault(checkpoint) == "optimizer/structure.json differs from its hash"

    structure.unlink()
    assert "structure.json is missing" in str(find_fault(checkpoint))
