"""Plans and joint graphs of earlier runs: a model that is compiled again takes what it had.

A plan is saved under a hash of all that it depends on: the captured graph, the cluster's figures, the options, the
versions of torch and OR-Tools, and the source code of this package. So a change of any of them is another key.

A joint graph is saved under a hash of what AOTAutograd makes it from: Dynamo's graph, the parameters, buffers and
inputs, torch's modes and flags, and the versions. Dynamo itself always runs, as no key knows all that a model's Python
code reads. A graph that holds something whose behaviour the key does not cover, such as an op of another library, has
no key: it is not saved.

What another program wrote there, or half of a file, is replaced after a warning. Files that were not used for the
longest time are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import operator
import os
import pickle
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses import FakeTensor

from shardweave.cost_model import Cluster, Options, cache_directory, store_cached, store_file
from shardweave.ir import PLAIN_TYPES, Captured, PlanError
from shardweave.planner import ModelKey, Plan
from shardweave.sharding import graph_outputs, info, module_of

SWITCH = "SHARDWEAVE_PLAN_CACHE"
"""The environment variable that switches the cache off, by ``0``."""
MAX_CACHED_FILES = 256
"""How many plans and graphs are kept."""
MAX_CACHED_BYTES = 2**29
"""How many bytes of plans and graphs are kept."""


def is_on() -> bool:
    """Whether plans are saved and taken."""
    return os.environ.get(SWITCH, "1") != "0"


def plan_key(captured: Captured, cluster: Cluster, options: Options) -> str:
    """A hash of what a plan is made from, in thirty-two hex digits; the same in each process.

    Examples
    --------
    >>> import torch
    >>> from shardweave.compiler.capture import capture
    >>> steps = [capture(torch.nn.Linear(8, size), torch.ones(4, 8)) for size in (8, 8, 16)]
    >>> first, again, other = (plan_key(step, Cluster.local(2), Options()) for step in steps)
    >>> first == again, first == other
    (True, False)
    """
    nodes = [
        (node.op, str(node.target), str((node.args, node.kwargs)), _described(node.meta.get("val")), repr(info(node)))
        for node in captured.graph.graph.nodes
    ]
    names = (
        captured.parameters, captured.buffers, captured.inputs, captured.tangents, captured.outputs, captured.gradients,
        captured.mutated, captured.aliases, captured.training, captured.whole, captured.dtypes,
        captured.input_gradients,
    )  # fmt: skip
    # These are no part of a plan.
    asked = replace(options, timeout=None, check_inputs=0, inductor=False, measure_ops=False).key
    versions = torch.__version__, version("ortools"), _source_hash()
    text = repr((nodes, names, cluster.name, cluster.fingerprint, asked, versions))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _described(value: object) -> str:
    """The shapes, strides and dtypes of a node's values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    return str([*map(_described, value)]) if isinstance(value, list | tuple) else str(value)


@cache
def _source_hash() -> str:
    """A hash of this package's source code: a plan is as its planner makes it."""
    root, found = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def cached_plan(key: str, model_key: ModelKey, cluster: Cluster) -> Plan | None:
    """The plan that was saved under a key; None if there is none, or after a warning if the file is none of ours."""
    path = cache_directory() / f"{_name(key)}.json"
    if not path.is_file():
        return None
    try:
        plan = Plan.load(path)
        plan.check(model_key, cluster)
    except PlanError as error:
        warnings.warn(f"the cached plan is not used, and made again: {error}", stacklevel=2)
        return None
    _used(path)
    return plan


def save_plan(key: str, plan: Plan, options: Options) -> None:
    """Save a plan for later runs, unless the time limit may have ended its search."""
    if plan.planning_seconds < options.time_limit:
        data: dict[str, Any] = plan.to_dict()
        store_cached(_name(key), data)
        _remove_oldest()


def _name(key: str) -> str:
    return f"plan-{key}"


def _used(path: Path) -> None:
    """Note that a file was used now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _remove_oldest() -> None:
    """Remove the plans and graphs that were not used for the longest time, beyond what is kept."""
    found: list[tuple[float, int, Path]] = []
    for path in [*cache_directory().glob("plan-*.json"), *cache_directory().glob("graph-*.bin")]:
        with contextlib.suppress(OSError):  # another process may have removed it
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    kept = 0
    for index, (_, size, path) in enumerate(sorted(found, reverse=True)):
        kept += size
        if index >= MAX_CACHED_FILES or (kept > MAX_CACHED_BYTES and index > 0):
            with contextlib.suppress(OSError):
                path.unlink()


# -- joint graphs

_TARGETS = ("torch", "_operator", "math")
"""The modules whose functions depend on nothing but their version and torch's flags."""
_OPS = ("aten", "prims")
"""The namespaces of ops of which the same is true."""
_HIGHER_ORDER = ("tag_activation_checkpoint", "autograd_function_apply")
"""The ops on graphs that depend on nothing but these graphs."""
_KNOWN_META = {
    "creation_timestamp", "example_value", "grapharg", "nn_module_stack", "source_fn_stack", "stack_trace",
    "tensor_dict", "val",
}  # fmt: skip
"""The metadata of nodes of Dynamo's graph. Other metadata may tell AOTAutograd something."""
_SAVED_META = ("val", "desc", "partitioner_tag", "nn_module_stack", "fwd_nn_module_stack", "stack_trace", "recompute",
               "ac_graph_id")  # fmt: skip
"""The metadata of nodes of a joint graph that shardweave reads."""
_HEADER = b"shardweave graph 1\n"
"""The start of a file, before the digest of what follows."""


class _NotCovered(Exception):
    """Something whose behaviour a key does not cover, or that a file does not hold."""


def trace_key(module: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Any] | None:
    """A hash of what AOTAutograd makes a joint graph from, and the structure of the model's result.

    None if the joint graph depends on more than the hash covers. `module` is Dynamo's graph.
    """
    if not is_on():
        return None
    try:
        # 1. Describe the tensors. Their storages are numbered, as views of one tensor are traced together.
        tensors = _Tensors()
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        places: dict[int, str] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                places[id(leaf)] = f".input{index}"  # no name of a parameter starts with a dot
        for name, tensor in named:
            places.setdefault(id(tensor), name)
        given = [places[id(leaf)] if id(leaf) in places else tensors(leaf) for leaf in leaves]
        described = [(name, places[id(tensor)], tensors(tensor)) for name, tensor in named]
        described += [("", places[id(leaf)], tensors(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # 2. Find what each input of Dynamo's graph is, and where its outputs are in the result.
        flatten: Any = module._dynamo_bytecode_flatten
        unflatten: Any = module._dynamo_bytecode_unflatten
        flat = (*args, *kwargs.values())
        inputs = [_place(value, places) for value in flatten(*flat)]
        results = [_made_again(node) for node in graph_outputs(module.graph)]
        places |= {id(value): f".output{index}" for index, value in enumerate(results)}
        returned, out_spec = pytree.tree_flatten(unflatten(results, flat))
        outputs = [_place(value, places) for value in returned]
        # 3. Describe the graph, and the state of torch.
        text = repr((_state(), str(spec), given, described, inputs, outputs, _graph_text(module, tensors)))
    except Exception:  # besides `_NotCovered`, whatever the model's own classes raise; a cache must not stop a capture
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:32], out_spec


def _place(value: Any, places: Mapping[int, str]) -> str:
    """The name of a tensor, or a constant."""
    if id(value) in places:
        return places[id(value)]
    if isinstance(value, PLAIN_TYPES):
        return f".constant {value!r}"
    raise _NotCovered(f"a {type(value).__name__} that is no input")


def _made_again(node: Any) -> Any:
    """A fake tensor like the result of a node of Dynamo's graph."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else node
    if not isinstance(value, torch.Tensor):
        raise _NotCovered("an output that is no tensor")
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class _Tensors:
    """Describes tensors and constants. Storages are numbered in the order in which they come."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}

    def __call__(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, fx.Node):
            return f"%{value.name}"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self(item)}' for key, item in value.items())}}}"
        if isinstance(value, list | tuple):
            return f"{'[' if isinstance(value, list) else '('}{', '.join(map(self, value))}]"
        if isinstance(value, slice):
            return f"slice({self(value.start)}, {self(value.stop)}, {self(value.step)})"
        if isinstance(value, (*PLAIN_TYPES, torch.layout, torch.memory_format)):
            return repr(value)
        raise _NotCovered(f"a {type(value).__name__}")

    def _tensor(self, value: torch.Tensor) -> str:
        if type(value) not in (torch.Tensor, torch.nn.Parameter, FakeTensor) or not _is_plain(value):
            raise _NotCovered(f"a tensor of the type {type(value).__name__}")
        storage = self._storages.setdefault(value.untyped_storage()._cdata, len(self._storages))
        place = storage, value.storage_offset(), value._is_view()
        device = value.device
        kind = str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else ""
        return f"{_described(value)} {device} {kind} {place} {value.requires_grad} {value.is_leaf}"


def _is_plain(value: torch.Tensor) -> bool:
    """Whether shape, strides and dtype say what a tensor is."""
    if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
        return False
    return all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset()))


def _state() -> object:
    """The versions, and the modes and flags of torch that decide which ops a function becomes."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    if _get_current_dispatch_mode_stack() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise _NotCovered("a mode of torch")
    cuda: Any = torch.backends.cuda
    cudnn = torch.backends.cudnn
    return (
        (torch.__version__, torch.version.git_version, sys.version, _source_hash()),
        torch._C._dynamo.guards.GlobalStateGuard().__getstate__(),
        sorted(torch._functorch.config.get_config_copy().items()),
        torch._C._get_sdp_priority_order(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.backends.cpu.get_cpu_capability()),
    )


def _graph_text(module: fx.GraphModule, tensors: _Tensors) -> list[object]:
    """A description of Dynamo's graph and of the graphs inside it."""
    if module.meta.get("_checkpoint_context_fn") is not None:
        raise _NotCovered("a policy of activation checkpointing, which is Python code")
    found: list[object] = []
    for node in module.graph.nodes:
        if unknown := node.meta.keys() - _KNOWN_META:
            raise _NotCovered(f"metadata called {unknown}")
        inner: object = None
        if node.op == "get_attr":
            inner = operator.attrgetter(node.target)(module)
            if not isinstance(inner, fx.GraphModule):
                raise _NotCovered("a constant tensor")
            inner = _graph_text(inner, tensors)
        elif node.op == "call_module":
            raise _NotCovered("a call of a module")
        target = _function_name(node.target) if node.op == "call_function" else node.target
        stack = [(path, str(kind)) for path, kind in node.meta.get("nn_module_stack", {}).values()]
        arguments = tensors(node.args), tensors(node.kwargs), tensors(node.meta.get("example_value"))
        found.append((node.name, node.op, target, inner, *arguments, stack, node.meta.get("stack_trace")))
    return found


def _function_name(target: Any) -> str:
    """The full name of a function of torch or of Python's operators."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.__name__ in _HIGHER_ORDER:
            return str(target.__name__)
    elif isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        if str(target).split(".")[0] in _OPS:
            return str(target)
    else:
        with contextlib.suppress(RuntimeError, AttributeError, KeyError):
            name: str = fx.node._get_qualified_name(target)
            root, *path = name.split(".")
            if root in _TARGETS and reduce(getattr, path, sys.modules[root]) is target:
                return name
    raise _NotCovered(f"a call of {target}")


class _Pickler(pickle.Pickler):
    """Writes the nodes of a joint graph. Nodes, ops, fake tensors and torch's constants are written by their names."""

    def __init__(self, file: io.BytesIO, nodes: Sequence[fx.Node]) -> None:
        super().__init__(file, protocol=5)
        self._index = {node: index for index, node in enumerate(nodes)}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, fx.Node):
            return "node", self._index[value]
        if isinstance(value, torch._ops.OpOverload):
            if value.namespace not in _OPS:
                raise _NotCovered(f"the op {value}")
            return "op", value.namespace, value._opname, value._overloadname
        if isinstance(value, torch.Tensor):
            if type(value) is not FakeTensor or not _is_plain(value):
                raise _NotCovered("a tensor with values")
            return "fake", tuple(value.shape), value.stride(), _constant(value.dtype), str(value.device)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return "torch", _constant(value)
        return ("device", str(value)) if isinstance(value, torch.device) else None


def _constant(value: object) -> str:
    return str(value).removeprefix("torch.")


class _Unpickler(pickle.Unpickler):
    """Reads the nodes of a joint graph. A file can name no other classes than those that such nodes have."""

    def __init__(self, file: io.BytesIO, nodes: Sequence[fx.Node], mode: Any) -> None:
        super().__init__(file)
        self._nodes, self._mode = nodes, mode
        self._fakes: dict[tuple[Any, ...], torch.Tensor] = {}

    def persistent_load(self, key: Any) -> Any:
        kind, *given = key
        if kind == "node":
            return self._nodes[given[0]]
        if kind == "op":
            return getattr(getattr(getattr(torch.ops, given[0]), given[1]), given[2])
        if kind == "torch":
            return getattr(torch, given[0])
        if kind == "device":
            return torch.device(given[0])
        if key not in self._fakes:
            shape, stride, dtype, device = given
            with self._mode:
                self._fakes[key] = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        return self._fakes[key]

    def find_class(self, module: str, name: str) -> Any:
        descriptors = "torch._functorch._aot_autograd.descriptors"
        if module == descriptors or (module, name) in {
            ("builtins", "slice"), ("builtins", "complex"), ("torch.utils.checkpoint", "CheckpointPolicy"),
        }:  # fmt: skip
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def save_graph(key: str, module: fx.GraphModule) -> None:
    """Save a joint graph for later runs, unless it has something that a file does not hold."""
    nodes, file, shared = list(module.graph.nodes), io.BytesIO(), dict[Any, Any]()
    pickler = _Pickler(file, nodes)
    try:
        pickler.dump(len(nodes))
        for node in nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise _NotCovered(f"a node of the kind {node.op}")
            target = ("getitem",) if node.target is operator.getitem else node.target
            if node.op == "call_function" and not isinstance(target, tuple | torch._ops.OpOverload):
                raise _NotCovered(f"a call of {target}")
            arguments = _thawed(node.args), _thawed(node.kwargs)
            pickler.dump((node.name, node.op, target, *arguments, _saved_meta(node, shared)))
    except (_NotCovered, pickle.PicklingError, TypeError, AttributeError):  # pickle raises all of these
        return
    content = file.getvalue()
    store_file(f"graph-{key}.bin", _HEADER + hashlib.sha256(content).digest() + content)
    _remove_oldest()


def cached_graph(key: str, mode: Any) -> fx.GraphModule | None:
    """The joint graph that was saved under a key, with fake tensors of `mode`.

    None if there is none, or after a warning if the file is damaged, of another program or of another user.
    """
    path = cache_directory() / f"graph-{key}.bin"
    try:
        written = path.stat()
        content = path.read_bytes()
    except OSError:
        return None
    start = len(_HEADER) + hashlib.sha256().digest_size
    body, reason = content[start:], ""
    if hasattr(os, "geteuid") and (written.st_uid != os.geteuid() or written.st_mode & 0o022):
        reason = "another user owns it or may write it"
    elif content[:start] != _HEADER + hashlib.sha256(body).digest():
        reason = "it is damaged, or of another program"
    else:
        try:
            graph = _read_graph(body, mode)
            _used(path)
            return module_of(fx.GraphModule({}, fx.Graph()), graph)
        except Exception as error:  # whatever a file of another program leads to
            reason = str(error)
    warnings.warn(f"the cached graph {path} is not used, and made again: {reason}", stacklevel=2)
    return None


def _read_graph(content: bytes, mode: Any) -> fx.Graph:
    graph, nodes = fx.Graph(), list[fx.Node]()
    unpickler = _Unpickler(io.BytesIO(content), nodes, mode)
    for _ in range(unpickler.load()):
        name, op, target, args, kwargs, meta = unpickler.load()
        node = graph.create_node(op, operator.getitem if target == ("getitem",) else target, args, kwargs, name)
        if node.name != name:
            raise ValueError(f"two nodes are called {name}")
        node.meta = meta
        nodes.append(node)
    return graph


def _saved_meta(node: fx.Node, shared: dict[Any, Any]) -> dict[str, Any]:
    """The metadata of a node that is saved. What is equal in several nodes is one object, and so written once."""
    meta = {name: node.meta[name] for name in _SAVED_META if name in node.meta}
    for name in ("nn_module_stack", "fwd_nn_module_stack"):
        if meta.get(name):
            stack = tuple((place, path, str(kind)) for place, (path, kind) in meta[name].items())
            meta[name] = shared.setdefault(stack, {place: (path, kind) for place, path, kind in stack})
    if "stack_trace" in meta:
        meta["stack_trace"] = shared.setdefault(meta["stack_trace"], meta["stack_trace"])
    return meta


def _thawed(value: Any) -> Any:
    """Arguments of a node in plain lists, tuples and dicts."""
    if isinstance(value, list):
        return [*map(_thawed, value)]
    if isinstance(value, tuple):
        return tuple(map(_thawed, value))
    if isinstance(value, dict):
        return {key: _thawed(item) for key, item in value.items()}
    return value
