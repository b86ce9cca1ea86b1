"""The private names of other libraries that the package uses, with the reasons and the versions that have them.

A release may move them without notice. Then the test of the name fails, and says what was lost.
"""

import ast
import functools
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import llmtrain

PACKAGE = Path(llmtrain.__file__).parent

# The versions that were seen to have the names.
VERSIONS = {
    "torch": "torch 2.13",
    "accelerate": "accelerate 1.15",
    "transformers": "transformers 5.23",
    "datasets": "datasets 5.2",
}
# The private names, each with its module or class, below the reason.
NAMES = [
    # From the ninth shape on, torch runs eager code, which rounds differently.
    "torch._dynamo.config.recompile_limit",
    # An evaluation runs what a block ran before it was compiled.
    "torch._dynamo.eval_frame.OptimizedModule._torchdynamo_orig_callable",
    # DDP would split a compiled block at the end of a bucket.
    "torch._dynamo.config.optimize_ddp",
    # An error of the compiler is told from one of the model.
    "torch._dynamo.exc.TorchDynamoException",
    # The number of documents differs between micro-batches.
    "torch._dynamo.maybe_mark_dynamic",
    # A user's torch.compile(model) is unwrapped.
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
    # DDP takes a communication hook once, and does not say whether it has one.
    "torch.nn.parallel.DistributedDataParallel._comm_hooks",
    # Heartbeats go through the launcher's store, which has no public name.
    "torch.distributed.distributed_c10d._get_default_store",
    # A heartbeat tells which collective a rank has not begun.
    # The type of FSDP2's units.
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    # The reductions of each unit are counted.
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
    # Empty shards get distinct addresses, by which Accelerate tells parameters apart.
    "torch.distributed.tensor.DTensor._local_tensor",
    # An optimizer with hooks must not be called if its step is skipped.
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "torch.optim.Optimizer._optimizer_step_post_hooks",
    # The backward pass of softmax in one kernel, for attention on CPUs.
    "torch._softmax_backward_data",
    # Whether a CPU multiplies in bfloat16 at full speed.
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    # The tensors inside the arguments and results of any function.
    "torch.utils._pytree.tree_leaves",
    # The memory of activations is counted operation by operation.
    "torch.utils._python_dispatch.TorchDispatchMode",
    # The memory of activations is counted without allocating it.
    "torch._subclasses.fake_tensor.FakeTensorMode",
    # Identifies the storage of a fake tensor, which has no address.
    "torch.UntypedStorage._cdata",
    # A notebook makes one run after the other in the same process.
    "accelerate.state.AcceleratorState._reset_state",
    "accelerate.state.GradientState._reset_state",
    # Accelerate would use DDP on CPUs although FSDP was asked for.
    "accelerate.state.PartialState._shared_state",
    # Which attention a model computes with.
    "transformers.PreTrainedConfig._attn_implementation",
    # A new model is initialised module by module, the same for any number of ranks.
    "transformers.PreTrainedModel._init_weights",
    # The names of a model's repeated blocks.
    "transformers.PreTrainedModel._no_split_modules",
    # The grouped product has no shape inference for float32, which plans need.
    "transformers.integrations.moe._can_use_grouped_mm",
    # A data set in memory is recognised when a run resumes.
    "datasets.Dataset._fingerprint",
]

# Names that look private and are not: Python documents them, or they are our own.
PUBLIC = {"os._exit", "_current_frames", "group"}
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


@functools.cache
def users() -> dict[str, set[str]]:
    """Return the modules of the package that use a private name of another library, by name."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in private_names(path.read_text()):
            is_ours = name.startswith("llmtrain.") or name in NAMED_TUPLE_METHODS
            if not is_ours:
                found.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
    return found


def exists(name: str) -> bool:
    """Return whether a module or class has a name, or a class gives it to its instances."""
    owner, _, attribute = name.rpartition(".")
    try:
        value = pkgutil.resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    if hasattr(value, attribute):
        return True
    if not inspect.isclass(value):
        return False
    sources = [inspect.getsource(base) for base in value.__mro__ if base.__module__ != "builtins"]
    return any(re.search(rf"\b(self|cls)\.{attribute}\b|\"{attribute}\"", text) for text in sources)


def is_use_of(used: str, name: str) -> bool:
    """Return whether a use, which may be an attribute of any object, is one of a name."""
    return f".{name}".endswith(f".{used}")


@pytest.mark.parametrize("name", NAMES)
def test_other_libraries_have_the_private_names_that_we_use(name: str) -> None:
    places = [paths for used, paths in users().items() if is_use_of(used, name)]
    assert places, f"nothing uses {name} any more, so delete its row"
    version = VERSIONS[name.partition(".")[0]]
    assert exists(name), (
        f"{name} has moved: {version} had it. The table says why {places} needs it."
    )


def test_the_table_has_every_private_name() -> None:
    used = users().keys() - PUBLIC
    new = [use for use in used if not any(is_use_of(use, name) for name in NAMES)]
    assert not new, f"use public names, or add rows with the reason: {new}"


def test_a_name_that_moves_is_noticed() -> None:
    assert not exists("torch._dynamo.config.recompile_limits")
    assert not exists("torch.nn.parallel.DistributedDataParallel._comm_hook_list")
    assert not exists("accelerate.moved.AcceleratorState._reset_state")


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
