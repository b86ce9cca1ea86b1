"""The private names of other libraries that the package uses, each with the reason and the version that has it.

A release may move them without notice. Then the test of the name fails, and says what was lost.
"""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import llmtrain

PACKAGE = Path(llmtrain.__file__).parent


class PrivateName(NamedTuple):
    """A private name of another library."""

    name: str  # as the package writes it: an import, a name below `torch`, or an attribute
    owners: tuple[str, ...]  # the modules or classes that have it
    version: str  # the newest one that was seen to have it
    reason: str


TABLE = [
    # --- argparse
    PrivateName(
        "_actions",
        ("argparse.ArgumentParser",),
        "Python 3.14",
        "a command parses the flags again that stand after the recipe's name",
    ),
    PrivateName(
        "_add_action",
        ("argparse.ArgumentParser",),
        "Python 3.14",
        "a command parses the flags again that stand after the recipe's name",
    ),
    # --- torch: the compiler
    PrivateName(
        "torch._dynamo.config.recompile_limit",
        ("torch._dynamo.config",),
        "torch 2.13",
        "from the ninth shape on, torch runs eager code, which rounds differently",
    ),
    PrivateName(
        "torch._dynamo.config.optimize_ddp",
        ("torch._dynamo.config",),
        "torch 2.13",
        "DDP would split a compiled block at the end of a bucket",
    ),
    PrivateName(
        "torch._dynamo.exc.TorchDynamoException",
        ("torch._dynamo.exc",),
        "torch 2.13",
        "an error of the compiler is told from one of the model",
    ),
    PrivateName(
        "torch._dynamo.maybe_mark_dynamic",
        ("torch._dynamo",),
        "torch 2.13",
        "the number of documents differs between micro-batches",
    ),
    PrivateName(
        "_orig_mod",
        ("torch._dynamo.eval_frame.OptimizedModule",),
        "torch 2.13",
        "a user's torch.compile(model) is unwrapped",
    ),
    # --- torch: processes and shards
    PrivateName(
        "_comm_hooks",
        ("torch.nn.parallel.DistributedDataParallel",),
        "torch 2.13",
        "DDP takes a communication hook once, and does not say whether it has one",
    ),
    PrivateName(
        "_get_default_store",
        ("torch.distributed.distributed_c10d",),
        "torch 2.13",
        "heartbeats go through the launcher's store, which has no public name",
    ),
    PrivateName(
        "_get_sequence_number_for_group",
        ("torch.distributed.ProcessGroup",),
        "torch 2.13",
        "a heartbeat tells which collective a rank has not begun",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group",),
        "torch 2.13",
        "the type of FSDP2's units",
    ),
    PrivateName(
        "_get_fsdp_state",
        ("torch.distributed.fsdp.FSDPModule",),
        "torch 2.13",
        "the reductions of each unit are counted",
    ),
    PrivateName(
        "_fsdp_param_group",
        ("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",),
        "torch 2.13",
        "the reductions of each unit are counted",
    ),
    PrivateName(
        "_local_tensor",
        ("torch.distributed.tensor.DTensor",),
        "torch 2.13",
        "empty shards get distinct addresses, by which Accelerate tells parameters apart",
    ),
    # --- torch: optimizers
    PrivateName(
        "_optimizer_step_pre_hooks",
        ("torch.optim.Optimizer",),
        "torch 2.13",
        "an optimizer with hooks must not be called if its step is skipped",
    ),
    PrivateName(
        "_optimizer_step_post_hooks",
        ("torch.optim.Optimizer",),
        "torch 2.13",
        "an optimizer with hooks must not be called if its step is skipped",
    ),
    # --- torch: tensors
    PrivateName(
        "torch._softmax_backward_data",
        ("torch",),
        "torch 2.13",
        "the backward pass of softmax in one kernel, for attention on CPUs",
    ),
    PrivateName(
        "_is_mkldnn_bf16_supported",
        ("torch.ops.mkldnn",),
        "torch 2.13",
        "whether a CPU multiplies in bfloat16 at full speed",
    ),
    PrivateName(
        "torch.utils._pytree.tree_leaves",
        ("torch.utils._pytree",),
        "torch 2.13",
        "the tensors inside the arguments and results of any function",
    ),
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        ("torch.utils._python_dispatch",),
        "torch 2.13",
        "the memory of activations is counted operation by operation",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        ("torch._subclasses.fake_tensor",),
        "torch 2.13",
        "the memory of activations is counted without allocating it",
    ),
    PrivateName(
        "_cdata",
        ("torch.UntypedStorage",),
        "torch 2.13",
        "identifies the storage of a fake tensor, which has no address",
    ),
    # --- Accelerate
    PrivateName(
        "_reset_state",
        ("accelerate.state.AcceleratorState", "accelerate.state.GradientState"),
        "accelerate 1.15",
        "a notebook makes one run after the other in the same process",
    ),
    PrivateName(
        "_shared_state",
        ("accelerate.state.PartialState",),
        "accelerate 1.15",
        "Accelerate would use DDP on CPUs although FSDP was asked for",
    ),
    # --- transformers
    PrivateName(
        "_attn_implementation",
        ("transformers.PreTrainedConfig",),
        "transformers 5.23",
        "which attention a model computes with",
    ),
    PrivateName(
        "_init_weights",
        ("transformers.PreTrainedModel",),
        "transformers 5.23",
        "a new model is initialised module by module, the same for any number of ranks",
    ),
    PrivateName(
        "_no_split_modules",
        ("transformers.PreTrainedModel",),
        "transformers 5.23",
        "the names of a model's repeated blocks",
    ),
    PrivateName(
        "_compile_jinja_template",
        ("transformers.utils.chat_template_utils",),
        "transformers 5.23",
        "compiles a chat template with all functions that templates use",
    ),
    PrivateName(
        "_plain_template_data",
        ("transformers.utils.chat_template_utils",),
        "transformers 5.23",
        "messages reach a template as transformers converts them",
    ),
    PrivateName(
        "_alias_reasoning_fields",
        ("transformers.utils.chat_template_utils",),
        "transformers 5.23",
        "messages reach a template as transformers converts them",
    ),
    PrivateName(
        "_can_use_grouped_mm",
        ("transformers.integrations.moe",),
        "transformers 5.23",
        "the grouped product has no shape inference for float32, which plans need",
    ),
    # --- datasets
    PrivateName(
        "_fingerprint",
        ("datasets.Dataset",),
        "datasets 5.2",
        "a data set in memory is recognised when a run resumes",
    ),
    PrivateName(
        "_indices",
        ("datasets.Dataset",),
        "datasets 5.2",
        "rows are read from the table itself, which a selection does not follow",
    ),
]

# Names that look private and are not: Python documents them, or they are our own.
PUBLIC = {"os._exit", "group"}
NAMED_TUPLE_METHODS = {"_asdict", "_replace", "_fields", "_make"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of other modules and objects that a program uses, as the table writes them."""
    tree = ast.parse(source)
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if any(map(is_private, path.split("."))):
                    yield path
        elif isinstance(node, ast.Attribute) and node not in inner:
            yield from _private_part(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            _, name, *_ = node.args
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield str(name.value)


def _private_part(chain: ast.Attribute) -> Iterator[str]:
    """Yield a chain of names below `torch`, or the private attributes in any other chain."""
    path = ast.unparse(chain)
    if re.fullmatch(r"torch(\.\w+)+", path) and any(map(is_private, path.split("."))):
        yield path
        return
    node: ast.AST = chain
    while isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if is_private(node.attr) and owner not in ("self", "cls", "super()"):
            yield f"os.{node.attr}" if owner == "os" else node.attr
        node = node.value


def users() -> dict[str, set[str]]:
    """Return the modules of the package that use a private name of another library, by name."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in private_names(path.read_text()):
            is_ours = name.startswith("llmtrain.") or name in NAMED_TUPLE_METHODS
            if not is_ours:
                found.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
    return found


def exists(name: str, owner: str) -> bool:
    """Return whether an owner has a name, or is a class that gives it to its instances."""
    try:
        value = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    attribute = name.rpartition(".")[2]
    if hasattr(value, attribute):
        return True
    if not inspect.isclass(value):
        return False
    sources = [inspect.getsource(base) for base in value.__mro__ if base.__module__ != "builtins"]
    return any(re.search(rf"\b(self|cls)\.{attribute}\b|\"{attribute}\"", text) for text in sources)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_other_libraries_have_the_private_names_that_we_use(row: PrivateName) -> None:
    for owner in row.owners:
        assert exists(row.name, owner), (
            f"{owner} has no {row.name.rpartition('.')[2]} any more; {row.version} had it. It is needed because "
            f"{row.reason}: see {', '.join(sorted(users()[row.name]))}."
        )


def test_the_table_has_every_private_name_and_no_other() -> None:
    used = users().keys() - PUBLIC
    listed = {row.name for row in TABLE}
    new = sorted(used - listed)
    assert not new, f"use public names, or add rows with the reason and the version: {new}"
    unused = sorted(listed - used)
    assert not unused, f"nothing uses these names any more, so delete their rows: {unused}"
    assert len(TABLE) == len(listed)


def test_a_name_that_moves_is_noticed() -> None:
    assert not exists("torch._dynamo.config.recompile_limits", "torch._dynamo.config")
    assert not exists("_comm_hook_list", "torch.nn.parallel.DistributedDataParallel")
    assert not exists("_reset_state", "accelerate.moved.AcceleratorState")


def test_private_names_are_found() -> None:
    source = """
from torch.utils._pytree import tree_leaves
torch._dynamo.config.recompile_limit = 1
model.config._attn_implementation.startswith("flash")
getattr(rows, "_indices", None)
self._own = _private()
"""
    names = ["torch.utils._pytree.tree_leaves", "torch._dynamo.config.recompile_limit"]
    assert sorted(private_names(source)) == sorted([*names, "_attn_implementation", "_indices"])
