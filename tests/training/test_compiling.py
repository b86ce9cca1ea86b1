"""Long runs on a GPU are compiled, and compute the same."""

import functools
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.gpt import GPT
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import TrainingAccelerator
from llmtrain.training import compiling
from llmtrain.training.callbacks import WarmUp
from llmtrain.training.compiling import compile_blocks, eager_code
from tests.engines import ScaledRows, engine_of
from tests.launching import long_form
from tests.models.small_models import byte_tokenizer
from tests.models.some_rows import SomeRows

IDS = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def new_gpt() -> GPT:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16), vocab_size=50)


def is_compiled(model: GPT) -> bool:
    return all("forward" in vars(block) for block in model.transformer.h)


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: str | Callable[..., Any]) -> None:
    """Compile with this backend instead of inductor, which takes most of a minute."""
    with_backend = functools.partial(compiling._compile, backend=backend)
    monkeypatch.setattr(compiling, "_compile", with_backend)


# --- the choice


@pytest.mark.parametrize(
    ("device", "steps", "shapes", "expected"),
    [
        ("cuda", 2000, 1, True),
        ("cuda", 1999, 1, False),
        ("cuda", 7999, 4, False),
        ("cpu", 10**9, 1, False),
    ],
)
def test_auto_compiles_a_long_run_on_a_gpu(
    device: str, steps: int, shapes: int, expected: bool
) -> None:
    assert should_compile(device, steps=steps, shapes=shapes) is expected


def should_compile(
    device: str,
    *,
    mode: str = "auto",
    bitwise: bool = False,
    earlier_choice: bool | None = None,
    steps: int = 10**9,
    shapes: int = 1,
) -> bool:
    """Make the choice of a run, by default of one that is long enough."""
    settings = SimpleNamespace(
        parallel=SimpleNamespace(torch_compile=mode, bitwise=bitwise),
        optim=SimpleNamespace(max_steps=steps),
    )
    run = SimpleNamespace(
        settings=settings, status=SimpleNamespace(compiled=earlier_choice), step=0
    )
    engine = SimpleNamespace(device=torch.device(device))
    context: Any = SimpleNamespace(run=run, engine=engine)
    return WarmUp(context)._should_compile(shapes)


@pytest.mark.parametrize(
    ("mode", "earlier_choice", "bitwise", "expected"),
    [
        ("auto", None, False, True),
        ("auto", None, True, False),
        ("auto", False, False, False),
        ("auto", True, True, True),
        ("never", True, False, False),
        ("always", False, True, True),
    ],
)
def test_a_resumed_run_keeps_its_choice_unless_the_flag_decides(
    mode: str, earlier_choice: bool | None, bitwise: bool, expected: bool
) -> None:
    options = {"mode": mode, "bitwise": bitwise, "earlier_choice": earlier_choice}

    assert should_compile("cuda", **options) is expected
    assert should_compile("cpu", **options) is (mode == "always")


# --- compiling


@pytest.mark.usefixtures("counter")  # which forgets the graphs of other tests
def test_the_error_of_a_compiler_is_one_line_with_the_flag_that_avoids_it(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: Any, inputs: Any) -> None:
        raise RuntimeError("no C++ compiler\nand more")

    compile_with(monkeypatch, fail)

    with pytest.raises(UserError, match=r"^.*no C\+\+ compiler; .*--torch_compile never.*$"):
        compile_blocks(engine_of(accelerator, new_gpt()), BATCH, shapes=1)


def test_compiling_changes_no_weights_gradients_or_random_numbers(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch, "eager")
    model = new_gpt()

    def draw(*_: object) -> None:
        torch.rand(1)  # as dropout does

    model.register_forward_hook(draw)
    engine = engine_of(accelerator, model, ScaledRows())
    weights = [parameter.clone() for parameter in model.parameters()]

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    compile_blocks(engine, BATCH, shapes=1)

    assert is_compiled(model)
    assert torch.equal(torch.rand(3), expected)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.grad is None


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=long_form)])
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)
def test_compiled_blocks_compute_the_same_gradients(
    backend: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = new_gpt()
    compiled = new_gpt()
    if backend != "inductor":
        compile_with(monkeypatch, backend)
    compile_blocks(engine_of(accelerator, compiled), BATCH, shapes=1)

    eager(**BATCH).backward()
    compiled(**BATCH).backward()

    gradients = {name: parameter.grad for name, parameter in compiled.named_parameters()}
    expected_gradients = {name: parameter.grad for name, parameter in eager.named_parameters()}
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), eager_code(compiled):
        assert torch.equal(compiled(**BATCH), eager(**BATCH))


def test_a_forward_that_a_user_has_given_a_block_runs_in_evaluations(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch, "eager")
    model = new_gpt()
    block = model.transformer.h[0]
    monkeypatch.setattr(block, "forward", lambda hidden, *_, **__: hidden)
    expected = model(**BATCH)

    for _ in range(2):
        with eager_code(model):
            assert torch.equal(model(**BATCH), expected)
        compile_blocks(engine_of(accelerator, model), BATCH, shapes=1)


# --- the number of graphs


class GraphCounter:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def counter() -> Iterator[GraphCounter]:
    torch._dynamo.reset()
    yield GraphCounter()
    torch._dynamo.reset()


def test_all_blocks_share_one_graph_in_every_step(counter: GraphCounter) -> None:
    config = GPTConfig(n_layer=12, n_head=2, n_embd=16, block_size=16, dropout=0.2)
    model = GPT(config, vocab_size=50).train()
    compiling._compile(model, counter)

    for micro_batch in range(40):
        dropout_keys = torch.arange(3) * 2**40 + micro_batch
        model(**BATCH, dropout_keys=dropout_keys).backward()

    assert counter.graphs == 1


def test_packed_rows_share_one_graph_wherever_documents_begin(counter: GraphCounter) -> None:
    bundle = load_model(
        ModelConfig(from_config="llama", max_length=64),
        lora=None,
        rows=SomeRows(byte_tokenizer(), is_packed=True),
        seed=0,
        precision="no",
    )
    bundle = move_to_devices(TrainingAccelerator(cpu=True).ranks, bundle)
    model = bundle.model.train()
    compiling._compile(model, counter)

    ids = torch.arange(2 * 65).view(2, 65)
    for second_document in range(3, 60, 5):
        positions = [torch.arange(second_document), torch.arange(65 - second_document)]
        batch = {
            "input_ids": ids,
            "labels": torch.where(ids % second_document == 1, ids, -100),
            "position_ids": torch.cat(positions).expand(2, -1),
        }
        model(**batch, **bundle.prepare_batch(batch)).backward()

    assert counter.graphs == 1


def test_every_width_of_trimmed_rows_is_compiled(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, counter: GraphCounter
) -> None:
    """By default, torch compiles eight shapes, and runs eager code for all others."""
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    compile_with(monkeypatch, counter)
    widths = range(8, 18)  # with that of BATCH, which is tried first
    engine = engine_of(accelerator, new_gpt())
    compile_blocks(engine, BATCH, shapes=len(widths))

    for _ in range(2):
        for width in widths:
            batch = {name: column[:, :width] for name, column in BATCH.items()}
            engine.loss(batch).loss.backward()

    assert counter.graphs == len(widths)
