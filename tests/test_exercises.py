"""`llmtrain learn LESSON --check FILE`: right answers pass, and wrong ones get a hint by what came out."""

import json
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from llmtrain.lessons import LESSONS, samplers
from llmtrain.lessons.common import WrongAnswerError
from llmtrain.lessons.exercise import check_answer, exercises
from tests.forked import run_forked
from tests.launching import BIN, PYTHON, Ended, long_form, run

RING = """
chunks = tensor.tensor_split(size)
for turn in range(2 * (size - 1)):
    into = chunks[(rank - turn - 1) % size]
    buffer = torch.empty_like(into)
    request = dist.isend(chunks[(rank - turn) % size], (rank + 1) % size)
    dist.recv(buffer, (rank - 1) % size)
    request.wait()
    if turn < size - 1:
        into += buffer
    else:
        into.copy_(buffer)
"""
FULL_TENSOR_IN_EACH_TURN = """
outgoing = tensor.clone()
for _ in range(size - 1):
    buffer = torch.empty_like(tensor)
    request = dist.isend(outgoing, (rank + 1) % size)
    dist.recv(buffer, (rank - 1) % size)
    request.wait()
    tensor += buffer
    outgoing = buffer
"""
BACKWARDS = """
chunks = tensor.tensor_split(size)
for turn in range(2 * (size - 1)):
    into = chunks[(rank + turn + 1) % size]
    buffer = torch.empty_like(into)
    request = dist.isend(chunks[(rank + turn) % size], (rank - 1) % size)
    dist.recv(buffer, (rank + 1) % size)
    request.wait()
    into.copy_(into + buffer if turn < size - 1 else buffer)
"""
ROWS = """
batch = order[step * batch_size :][:batch_size]
return (batch + [None] * (batch_size - len(batch)))[rank::processes]
"""
BLOCKS = """
size = batch_size // processes
block = order[rank * len(order) // processes :][: len(order) // processes]
return (block[step * size :] + [None] * size)[:size]
"""
ACCUMULATE = """
for number, batch in enumerate(batches):
    is_last = number == len(batches) - 1
    with contextlib.nullcontext() if is_last else model.no_sync():
        (model(**batch) / tokens * dist.get_world_size()).backward()
"""
FORWARD_OUTSIDE = """
for number, batch in enumerate(batches):
    loss = model(**batch) / tokens * dist.get_world_size()
    with contextlib.nullcontext() if number == len(batches) - 1 else model.no_sync():
        loss.backward()
"""
MASKS = """
def mask(slot):
    generator = torch.Generator().manual_seed((2000 * seed + step) * 100 + slot)
    return torch.rand(size, generator=generator) < 0.5
return torch.stack([mask(slot) for slot in slots])
"""
LOAD = """
with safe_open(file, "pt") as tensors:
    rows = tensors.get_slice(name)
    count = rows.get_shape()[0]
    share = -(-count // processes)
    return rows[min(rank * share, count) : min(rank * share + share, count)]
"""
CHUNK = """
with safe_open(file, "pt") as tensors:
    return tensors.get_tensor(name).chunk(processes)[rank]
"""
SCATTER = """
share = -(-len(gradient) // size)
padded = torch.cat([gradient, gradient.new_zeros(share * size - len(gradient), gradient.shape[1])])
total = padded[:share].clone()
dist.reduce_scatter(total, list(padded.chunk(size)))
return total[: max(0, len(gradient) - rank * share)] / size
"""
RIGHT = {
    "ring": RING,
    "samplers": ROWS,
    "accumulation": ACCUMULATE,
    "bits": MASKS,
    "saving": LOAD,
    "sharding": SCATTER,
}
# A lesson, a part of the hint, and an answer.
WRONG = [
    ("ring", "has the mean", RING + "tensor /= size"),
    ("ring", "only its own values", "dist.all_reduce(tensor.clone())"),
    ("ring", "rest at the end is not added", RING.replace("tensor.tensor", "tensor[:len(tensor) // size * size].tensor")),
    ("ring", "N - 1 more turns", RING.replace("2 * (size - 1)", "size - 1")),
    ("ring", "came by ['allreduce']", "dist.all_reduce(tensor)"),
    ("ring", "came by ['all_reduce']", "import torch.distributed._functional_collectives as f\ntensor.copy_(f.all_reduce(tensor, 'sum', dist.group.WORLD))"),
    ("ring", "sends 2.000 times its tensor", FULL_TENSOR_IN_EACH_TURN),
    ("ring", "only send to the next rank", BACKWARDS),
    ("ring", "longer than the tensor that receives it", RING.replace("empty_like(into)", "empty_like(into[1:])")),
    ("samplers", "some rows twice", ROWS.replace("rank::", "::")),
    ("samplers", "only [", ROWS.replace("order[step", "(order * 2)[step")),
    ("samplers", "rows are missing", "order = order[: len(order) // batch_size * batch_size]" + ROWS),
    ("samplers", "whatever the number of processes", BLOCKS),
    ("samplers", "rows of the order", ROWS.replace("None", "-1")),
    ("samplers", "rows of the order", "import torch\nreturn list(torch.zeros(batch_size // processes))"),
    ("accumulation", "no gradient is reduced", ACCUMULATE.replace("len(batches) - 1", "None")),
    ("accumulation", "around the forward pass, too", FORWARD_OUTSIDE),
    ("accumulation", "[1, 0, 0]", ACCUMULATE.replace("len(batches) - 1", "0")),
    ("accumulation", "once too often", ACCUMULATE.replace(" * dist.get_world_size()", "")),
    ("accumulation", "gradient of a sum", ACCUMULATE.replace(" / tokens", "")),
    ("bits", "the masks of rank 0", "torch.manual_seed(2000 * seed + step)\nreturn torch.rand(len(slots), size) < 0.5"),
    ("bits", "second call", "return torch.rand(len(slots), size) < 0.5"),
    ("bits", "have the same mask", MASKS.replace("(2000 * seed + step) * 100", "seed + step")),
    ("bits", "have the same mask", MASKS.replace("(2000 * seed + step) * 100", "1000 * seed + 100 * step")),
    ("bits", "have the same mask", MASKS.replace("(2000 * seed + step) * 100", "1000 * seed + 10 * step")),
    ("bits", "have the same mask", MASKS.replace("(2000 * seed + step) * 100 + slot", 'int(f"{seed}{step}{slot}")')),
    ("bits", "90% of the elements", MASKS.replace("< 0.5", "< 0.9")),
    ("saving", "is rounded up", LOAD.replace("-(-count // processes)", "count // processes")),
    ("saving", "rows of another rank", LOAD.replace("rank * share", "(processes - 1 - rank) * share")),
    ("saving", "IndexError in line 33", CHUNK),
    ("sharding", "returns the sum", SCATTER.replace(" / size", "")),
    ("sharding", "its own gradient", "share = -(-len(gradient) // size)\nreturn gradient[rank * share :][:share] / size"),
    ("sharding", "came by ['allreduce']", "dist.all_reduce(gradient)\nshare = -(-len(gradient) // size)\nreturn gradient[rank * share :][:share] / size"),
    ("sharding", "rounded up", SCATTER.replace("[: max(0, len(gradient) - rank * share)]", "")),
]  # fmt: skip
ENDLESS = [
    ("rank 0 in line 26, rank 1 in line 26", "dist.send(tensor, (rank + 1) % size)"),
    ("rank 0 in the check, rank 1 in line 27", "if rank == 1:\n    dist.recv(tensor, 0)"),
]


def write_answer(lesson: str, body: str, path: Path) -> Path:
    function = textwrap.indent(body.strip("\n"), "    ")
    path.write_text(exercises()[lesson].replace("    raise NotImplementedError", function))
    return path


@pytest.fixture(scope="module", autouse=True)
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start the server of tests/forked.py. A process has one, and those tests need more of it."""
    script = tmp_path_factory.mktemp("server") / "empty.py"
    script.write_text("")
    run_forked([*PYTHON, str(script)]).assert_ok()


@pytest.mark.parametrize("lesson", RIGHT)
def test_a_right_answer_is_right(lesson: str, tmp_path: Path) -> None:
    assert check_answer(lesson, write_answer(lesson, RIGHT[lesson], tmp_path / "a.py"), seed=1) == {
        "right": True
    }


@pytest.mark.parametrize(
    "answer", sorted(Path(__file__).parent.glob("exercises/*.py")), ids=lambda path: path.stem
)
def test_the_answer_of_a_stranger_is_right(answer: Path) -> None:
    assert check_answer(answer.stem.partition("_")[0], answer, seed=1) == {"right": True}


@pytest.mark.parametrize(("lesson", "hint", "body"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_answer_gets_a_hint_by_what_came_out(
    lesson: str, hint: str, body: str, tmp_path: Path
) -> None:
    result = check_answer(lesson, write_answer(lesson, body, tmp_path / "a.py"), seed=1)
    assert not result["right"]
    assert hint in result["hint"]


@pytest.mark.parametrize("lesson", RIGHT)
def test_an_exercise_that_is_not_written_says_so(lesson: str, tmp_path: Path) -> None:
    file = write_answer(lesson, "raise NotImplementedError", tmp_path / "a.py")
    assert "write the function" in check_answer(lesson, file, seed=1)["hint"]


@pytest.mark.parametrize(
    ("places", "body"), [ENDLESS[0], pytest.param(*ENDLESS[1], marks=long_form)]
)
def test_an_endless_answer_ends_and_leaves_no_process(
    places: str, body: str, tmp_path: Path
) -> None:
    result = check_answer("ring", write_answer("ring", body, tmp_path / "a.py"), seed=1)
    assert places in result["hint"]
    time.sleep(0.5)
    this = psutil.Process()
    assert [child for child in this.children(recursive=True) if child.ppid() != this.pid] == []


def test_an_answer_that_is_right_for_one_input_only_is_wrong() -> None:
    rows = []
    answer: dict = {}
    exec(
        exercises()["samplers"].replace(
            "    raise NotImplementedError", textwrap.indent(ROWS, "    ")
        ),
        answer,
    )

    def record(*arguments: object) -> list:
        rows.append(answer["rank_rows"](*arguments))
        return rows[-1]

    samplers.check(record, 2, seed=1)
    again = iter(rows)
    once_more = iter(rows)
    samplers.check(lambda *_: next(again), 2, seed=1)
    with pytest.raises(WrongAnswerError):
        samplers.check(lambda *_: next(once_more), 2, seed=2)


# --- the command


def learn(folder: Path, *words: str) -> Ended:
    return run(
        ["bash", "-c", 'cd "$0" && exec "$@"', str(folder), str(BIN / "llmtrain"), "learn", *words]
    )


def test_the_command_writes_an_exercise_once_and_names_the_lessons_that_have_one(
    tmp_path: Path,
) -> None:
    written = learn(tmp_path, "ring", "--exercise").assert_ok()
    assert "llmtrain learn ring --check ring_exercise.py" in written.out
    assert (tmp_path / "ring_exercise.py").read_text() == exercises()["ring"]

    assert "ring_exercise.py is there, and stays" in learn(tmp_path, "ring", "--exercise").err
    for words in (["late", "--exercise"], ["--exercise"], ["late", "--check", "ring_exercise.py"]):
        refused = learn(tmp_path, *words)
        assert refused.status == 2
        assert f"name a lesson that has an exercise: {', '.join(exercises())}." in refused.err
    assert "no.py is no file" in learn(tmp_path, "ring", "--check", "no.py").err
    assert ", ".join(exercises()) in learn(tmp_path).out
    assert [name for name in LESSONS if name in RIGHT] == [*exercises()]


@long_form
@pytest.mark.timeout(900)
def test_the_command_marks_answers_with_new_input_each_time(tmp_path: Path) -> None:
    seeds = set()
    for lesson, body in RIGHT.items():
        file = write_answer(lesson, body, tmp_path / f"{lesson}.py")
        checked = learn(tmp_path, lesson, "--check", file.name, "--json").assert_ok()
        seeds.add(json.loads(checked.out)["seed"])
    assert len(seeds) == len(RIGHT)

    assert "Next: llmtrain learn late" not in checked.out
    right = learn(tmp_path, "ring", "--check", "ring.py").assert_ok()
    assert right.out == "right, on 2 and on 3 processes. Next: llmtrain learn overlap\n"

    last_of_lesson = {lesson: (hint, body) for lesson, hint, body in WRONG}
    for lesson, (hint, body) in last_of_lesson.items():
        file = write_answer(lesson, body, tmp_path / "wrong.py")
        checked = learn(tmp_path, lesson, "--check", file.name, "--json", "--seed", "1")
        assert checked.status == 1
        assert hint in json.loads(checked.out)["hint"]
