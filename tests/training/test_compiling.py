"""Which runs are compiled, and that nothing else changes by it."""

import functools
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.gpt import GPT
from llmtrain.models.pretrained import load_model
from llmtrain.parallel.placement import place
from llmtrain.training import callbacks, compiling
from llmtrain.training.callbacks import WarmUp
from llmtrain.training.compiling import compile_blocks, eager_code, is_worth_compiling
from tests.engines import engine_of
from tests.launching import long_form
from tests.models.some_rows import SomeRows

IDS = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def gpt() -> GPT:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16), vocab_size=50)


def is_compiled(model: GPT) -> bool:
    return all("forward" in vars(block) for block in model.transformer.h)


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: str | Callable[..., Any]) -> None:
    """Let another backend than inductor compile, which takes most of a minute."""
    compile_blocks_of = functools.partial(compiling._compile, backend=backend)
    monkeypatch.setattr(compiling, "_compile", compile_blocks_of)


@pytest.mark.parametrize(
    ("device", "steps", "shapes", "expected"),
    [
        ("cuda", 2000, 1, True),
        ("cuda", 1999, 1, False),
        ("cuda", 8000, 4, True),
        ("cuda", 7999, 4, False),
        ("cpu", 10**9, 1, False),
        ("mps", 10**9, 1, False),
    ],
)
def test_auto_compiles_a_long_run_on_a_gpu(
    device: str, steps: int, shapes: int, expected: bool
) -> None:
    assert is_worth_compiling(torch.device(device), steps, shapes) is expected


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
def test_a_run_stays_with_what_it_has_chosen(
    mode: str,
    earlier_choice: bool | None,
    bitwise: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(callbacks, "is_worth_compiling", lambda *_, **__: True)
    settings = SimpleNamespace(
        parallel=SimpleNamespace(torch_compile=mode, bitwise=bitwise),
        optim=SimpleNamespace(max_steps=10),
    )
    status = SimpleNamespace(compiled=earlier_choice)
    run = SimpleNamespace(settings=settings, status=status, step=0)
    engine = SimpleNamespace(device=torch.device("cuda"))
    context: Any = SimpleNamespace(run=run, engine=engine)
    assert WarmUp(context)._should_compile(shapes=1) is expected

    engine.device = torch.device("cpu")
    assert WarmUp(context)._should_compile(shapes=1) is (mode == "always")


def test_a_compiler_that_fails_is_one_line(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: Any, inputs: Any) -> None:
        raise RuntimeError("no C++ compiler\nand more")

    compile_with(monkeypatch, fail)
    says = r"^torch.compile does not work here: .*no C\+\+ compiler; use --torch_compile never.$"
    with pytest.raises(UserError, match=says):
        compile_blocks(engine_of(accelerator, gpt()), BATCH, shapes=1)


def test_compiling_leaves_no_trace(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(monkeypatch, "eager")
    model = gpt()

    def draws(*_: object) -> None:  # as a model's own dropout does
        torch.rand(1)

    model.register_forward_hook(draws)
    before = [p.clone() for p in model.parameters()]
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    compile_blocks(engine_of(accelerator, model), BATCH, shapes=1)
    assert is_compiled(model)
    assert torch.equal(torch.rand(3), expected)
    assert all(
        torch.equal(a, b) and b.grad is None
        for a, b in zip(before, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=long_form)])
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)
def test_compiled_blocks_compute_what_they_computed(
    backend: str, accelerator: Accelerator, monkeypatch
) -> None:
    eager, model = gpt(), gpt()
    if backend != "inductor":  # which alone takes most of a minute
        compile_with(monkeypatch, backend)
    engine = engine_of(accelerator, model)
    compile_blocks(engine, BATCH, shapes=1)
    for network in (eager, model):
        network(**BATCH).backward()
    for (name, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in eager.named_parameters()
    ]
    with torch.no_grad(), eager_code(model):
        assert torch.equal(model(**BATCH), eager(**BATCH))


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """The graphs that are compiled."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def counting(graphs: list[Any]) -> Callable[..., Any]:
    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


def test_all_blocks_are_one_graph_and_stay_it(graphs: list[Any]) -> None:
    model = GPT(
        GPTConfig(n_layer=12, n_head=2, n_embd=16, block_size=16, dropout=0.2), vocab_size=50
    ).train()
    compiling._compile(model, counting(graphs))
    for update in range(20):
        for key in range(2):
            model(**BATCH, dropout_keys=torch.arange(3) * 2**40 + update * 2 + key).backward()
    assert len(graphs) == 1


def test_packed_rows_are_one_graph_wherever_documents_begin(graphs: list[Any]) -> None:
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    rows = SomeRows(tokenizer, is_packed=True)
    config = ModelConfig(from_config="llama", max_length=64)
    accelerator = Accelerator(cpu=True)
    bundle = place(accelerator, load_model(config, None, rows, 0, "no"))
    model = bundle.model.train()
    compiling._compile(model, counting(graphs))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        border = int(torch.randint(2, 60, (), generator=generator))
        positions = torch.cat([torch.arange(border), torch.arange(65 - border)]).expand(2, -1)
        ids = torch.randint(200, (2, 65), generator=generator)
        labels = torch.where(torch.rand(2, 65, generator=generator) < 0.5, ids, -100)
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
        model(**batch, **bundle.prepare_batch(batch)).backward()
    assert len(graphs) == 1


@pytest.fixture
def recompile_limit() -> Iterator[None]:
    """Restore torch's own limit after the test."""
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit


@pytest.mark.usefixtures("recompile_limit")
def test_every_shape_of_trimmed_rows_is_compiled(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, graphs: list[Any]
) -> None:
    """By default torch compiles eight shapes, and runs eager code for all others."""
    compile_with(monkeypatch, counting(graphs))
    widths = range(6, 18)
    engine = engine_of(accelerator, gpt())
    compile_blocks(engine, BATCH, shapes=len(widths))
    for _ in range(2):
        for width in widths:
            engine.loss({name: column[:, :width] for name, column in BATCH.items()}).loss.backward()
    assert len(graphs) == len(widths)


def test_trying_it_leaves_other_devices_alone(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[Any] = []
    honest = torch.random.fork_rng
    monkeypatch.setattr(
        torch.random, "fork_rng", lambda *devices: forked.append(devices) or honest(*devices)
    )
    compiling._try(engine_of(accelerator, gpt()), BATCH)
    assert forked == [([],)]  # without a list it is every GPU of the machine
