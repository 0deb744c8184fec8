"""What a user can get wrong: each is a ParallelError that names the thing and the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardweave as sw
from shardweave.demo.model import GPT, GPTConfig
from shardweave.runtime.launch import WorkerPool
from tests.models import ZOO

MLP = ZOO["mlp"]


def assert_told(error: BaseException, *parts: str) -> None:
    """The error is the package's own, and says all of this."""
    assert isinstance(error, sw.ParallelError), repr(error)
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def caught(call: Any, *args: Any, **kwargs: Any) -> sw.ParallelError:
    """The error that a call raises; on a rank, too."""
    try:
        call(*args, **kwargs)
    except sw.ParallelError as error:
        return error
    raise AssertionError("it was let through")


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.max() > 1:  # the culprit
            y = y[:1]
        result: Tensor = y.sum()
        return result


def test_a_model_that_cannot_be_captured() -> None:
    number = next(i for i, code in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the culprit" in code)
    for front in (sw.plan, sw.compile_parallel):
        error = caught(front, Branching(), sw.Cluster.local(1), torch.zeros(2, 4))
        assert_told(error, "Branching", f"test_bad_input.py:{number}", "if y.max() > 1", "torch.where")


def compiled_before() -> dict[str, Any]:
    """Models that are not compiled as they are, each made by a function: what torch or this package has made of one."""

    def plain() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def parallel(**given: Any) -> nn.Module:
        return sw.compile_parallel(plain(), sw.Cluster.local(1), progress=False, **given)

    return {
        "compile_parallel": lambda: parallel(example_inputs=torch.zeros(4, 4)),
        "the original model": parallel,
        "the model's part 0 (ParallelSequential)": lambda: nn.Sequential(parallel(example_inputs=torch.zeros(4, 4))),
        "given to torch.compile": lambda: torch.compile(plain()),
        "DataParallel": lambda: nn.DataParallel(plain()),
        "scripted": lambda: torch.jit.trace(plain(), torch.zeros(4, 4)),
        "got an object of function": lambda: compiled_before,
        "got the class Sequential": lambda: nn.Sequential,
        "wrapped in DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(plain()),
        "sharded by fully_shard": lambda: fully_shard(plain()),
        "0.weight is a DTensor": lambda: parallelize_module(
            plain(), init_device_mesh("cpu", (dist.get_world_size(),)), {"0": ColwiseParallel()}
        ),
    }


def assert_refused(made: Any, told: str, world: int) -> None:
    """Both doors refuse the model, before anything else is done with it."""
    for front in (sw.plan, sw.compile_parallel):
        error = caught(front, made(), sw.Cluster.local(world), torch.zeros(4, 4))
        assert_told(error, "the model", told)
        assert isinstance(error, sw.CaptureError) and "Dynamo" not in str(error)


def wrapped_on_ranks() -> None:
    for told, made in list(compiled_before().items())[-3:]:
        assert_refused(made, told, dist.get_world_size())


@pytest.mark.parametrize("told", list(compiled_before())[:-3])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_that_is_compiled_already(told: str) -> None:
    assert_refused(compiled_before()[told], told, 1)


def test_a_model_that_is_parallel_already(pool: WorkerPool) -> None:
    pool.run(wrapped_on_ranks, nprocs=2)


def test_an_op_without_a_rule() -> None:
    class Unruled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.matrix_exp(self.linear(x)).sum()

    error = caught(
        sw.plan, Unruled(), sw.Cluster.local(2), torch.zeros(4, 4), options=sw.Options(replicate_unknown_ops=False)
    )
    assert isinstance(error, sw.RuleError)
    assert_told(error, "matrix_exp", "test_bad_input.py", "shardweave.rule", "replicate_unknown_ops=True")


def test_a_model_with_nothing_to_spread() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.scale.exp(), x.sin()

    error = caught(sw.plan, Apart(), sw.Cluster.local(2), torch.zeros(4, 8))
    assert_told(error, "Apart", "no op that reads a parameter")


@pytest.mark.parametrize("force", [{}, {"*": "dp"}])
def test_a_batch_that_does_not_divide(force: dict[str, str]) -> None:
    error = caught(sw.plan, nn.Linear(7, 5), sw.Cluster.local(4), torch.zeros(6, 7), options=sw.Options(force=force))
    assert isinstance(error, sw.PlanError)
    assert_told(error, "batch of 6", "4 devices")
    assert re.search("[Uu]se |[Ff]orce another|[Cc]hange", str(error)), error


def compiled(model: nn.Module | None = None, inputs: Any = None, world: int | None = None, **options: Any) -> Any:
    cluster = sw.Cluster.local(world or (dist.get_world_size() if dist.is_initialized() else 1))
    return sw.compile_parallel(model or MLP.model(), cluster, inputs or MLP.batch(0), options=sw.Options(**options))


@pytest.fixture(scope="module")
def single() -> sw.ParallelModule:
    """A model on one device: inputs are checked in this process."""
    module = compiled()
    assert isinstance(module, sw.ParallelModule)
    return module


X, Y = torch.zeros(8, 6), torch.zeros(8, 7)


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((X.double(), Y), {}, ("'x'", "float32", "float64", ".to(torch.float32)")),
        ((X.long(), Y), {}, ("'x'", "float32", "int64")),
        ((X, Y, Y), {}, ("forward",)),
        ((X,), {"target": Y}, ("target",)),
        ((), {}, ("forward", "x")),
        ((X.to("meta"), Y), {}, ("'x'", "meta", "cpu")),
        ((X.to_sparse(), Y), {}, ("'x'", "torch.sparse_coo", "x.to_dense()")),
        ((X.to_sparse_csr(), Y), {}, ("'x'", "torch.sparse_csr", "x.to_dense()")),
        ((X, torch.nested.as_nested_tensor([*Y], layout=torch.jagged)), {}, ("'targets'", "nested_tensor_from_jagged")),
    ],
)
def test_an_input_of_another_dtype_or_kind(
    args: tuple[Any, ...], kwargs: dict[str, Any], told: tuple[str, ...], single: sw.ParallelModule
) -> None:
    error = caught(single, *args, **kwargs)
    assert isinstance(error, sw.InputError)
    assert_told(error, *told)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((torch.zeros(6, 6), Y), ("torch.Size([8, 7])", "mlp.py")),
        ((X, torch.zeros(8, 5)), ("torch.Size([8, 5])", "mlp.py")),
        ((X.tolist(), Y), ("Linear", "mlp.py")),
    ],
)
@pytest.mark.filterwarnings("ignore:the model is compiled again", "ignore:Using a target size")
def test_inputs_that_the_model_refuses(
    args: tuple[Any, ...], told: tuple[str, ...], single: sw.ParallelModule
) -> None:
    """Another call is compiled for its inputs, and the model's own error names the line."""
    error = caught(single, *args)
    assert isinstance(error, sw.CaptureError)
    assert_told(error, *told)


def inputs_on_ranks() -> None:
    """Targets of another batch, or dtype; the ranks stay together and the next good call works."""
    parallel = compiled(force={"*": "dp"})
    good = MLP.batch(0)
    expected = parallel(**good)
    assert_told(caught(parallel.local, torch.zeros(6, 7)), "(6, 7)", "4 parts")
    assert_told(caught(parallel, torch.zeros(8, 6), torch.zeros(8, 7, dtype=torch.float64)), "'targets'", "float64")
    assert_told(caught(parallel, torch.zeros(8, 6), torch.zeros(8, 7).to_sparse()), "'targets'", "sparse_coo")
    assert_told(caught(compiled, inputs={"x": X.to_sparse(), "targets": Y}), "'x'", "torch.sparse_coo")
    torch.testing.assert_close(parallel(**good), expected)


def test_inputs_on_ranks(pool: WorkerPool) -> None:
    pool.run(inputs_on_ranks, nprocs=4)


@pytest.fixture
def description() -> dict[str, Any]:
    data: dict[str, Any] = sw.Cluster.preset("dgx-a100", nodes=2).to_dict()
    data.pop("sources", None)
    return data


def load(data: Any, folder: Path) -> sw.ParallelError:
    path = folder / "machine.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    error = caught(sw.Cluster.load, path)
    assert isinstance(error, sw.ClusterError)
    assert_told(error, "machine.yaml", "expected")
    return error


@pytest.mark.parametrize("key", ["flops", "memory", "memory_bandwidth"])
def test_a_cluster_file_without_a_figure_of_the_device(key: str, description: dict[str, Any], tmp_path: Path) -> None:
    del description["device"][key]
    assert_told(load(description, tmp_path), f"device.{key}")


@pytest.mark.parametrize("key", ["name", "size", "bandwidth", "latency"])
def test_a_cluster_file_without_a_figure_of_a_level(key: str, description: dict[str, Any], tmp_path: Path) -> None:
    del description["levels"][1][key]
    assert_told(load(description, tmp_path), "levels", key)


@pytest.mark.parametrize("value", [-1, "fast", None, float("nan")])
@pytest.mark.parametrize("key", ["size", "bandwidth", "latency"])
def test_a_cluster_file_with_a_wrong_figure(key: str, value: Any, description: dict[str, Any], tmp_path: Path) -> None:
    description["levels"][0][key] = value
    assert_told(load(description, tmp_path), key, "nan" if value != value else str(value))


@pytest.mark.parametrize("text", ["", "levels: [", "- 1\n- 2", "device: {}", "name: x\nlevles: []"])
def test_a_cluster_file_that_is_no_description(text: str, tmp_path: Path) -> None:
    load(text, tmp_path)


def test_a_cluster_that_is_nowhere(tmp_path: Path) -> None:
    assert_told(caught(sw.Cluster.load, tmp_path / "none.yaml"), "none.yaml")
    assert_told(caught(sw.Cluster.preset, "dgx-a1000"), "dgx-a1000", "dgx-a100")


def too_many_ranks(plan: dict[str, Any]) -> None:
    """Four ranks run, and both the cluster and the plan have two devices."""
    for cluster in (sw.Cluster.local(2), sw.Cluster.local(8)):
        error = caught(sw.compile_parallel, MLP.model(), cluster, MLP.batch(0))
        assert_told(error, f"{cluster.world_size} devices", "4 rank", "start as many ranks")
    error = caught(sw.compile_parallel, MLP.model(), None, MLP.batch(0), plan=sw.Plan.from_dict(plan))
    assert_told(error, "the plan is for 2 devices", "has 4", "Make a plan")
    error = caught(sw.compile_parallel, MLP.model(), sw.Cluster.local(2), MLP.batch(0), plan=sw.Plan.from_dict(plan))
    assert_told(error, "2 devices", "4 rank")


def test_more_ranks_than_the_plan_has(pool: WorkerPool) -> None:
    plan = sw.plan(MLP.model(), sw.Cluster.local(2), MLP.batch(0))
    pool.run(too_many_ranks, plan.to_dict(), nprocs=4)


def test_ranks_without_a_world() -> None:
    error = caught(sw.compile_parallel, MLP.model(), sw.Cluster.local(4), MLP.batch(0))
    assert_told(error, "4 devices", "1 rank")


def test_a_plan_from_another_model() -> None:
    plan = sw.plan(MLP.model(), sw.Cluster.local(1), MLP.batch(0))
    gpt = ZOO["gpt"]
    error = caught(sw.compile_parallel, gpt.model(), None, gpt.batch(0), plan=plan)
    assert isinstance(error, sw.PlanError)
    assert_told(error, "parameter first.weight is in the plan and not here", "another model", "shardweave.plan(")


def test_a_plan_from_a_model_of_other_sizes() -> None:
    def small(width: int) -> nn.Module:
        return GPT(GPTConfig(vocabulary=16, context=8, layers=1, heads=2, width=width))

    tokens = torch.zeros(4, 8, dtype=torch.long)
    plan = sw.plan(small(16), sw.Cluster.local(1), tokens)
    error = caught(sw.compile_parallel, small(32), None, tokens, plan=plan)
    assert_told(error, "parameter tokens.weight has shape (16, 16) in the plan and (16, 32) here", "more")
    error = caught(sw.compile_parallel, small(16), None, tokens[:2], plan=plan)
    assert_told(error, "input tokens has shape (4, 8) in the plan and (2, 8) here")


def test_a_plan_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("", "{}", '{"format": "shardweave plan", "version": 0}'):
        path.write_text(text)
        error = caught(sw.Plan.load, path)
        assert isinstance(error, sw.PlanError)
        assert_told(error, "plan.json", "expected")
    assert_told(caught(sw.Plan.load, tmp_path / "none.json"), "none.json")


def no_plan_fits() -> str:
    return str(caught(compiled, memory_limit=100))


def test_a_limit_that_no_plan_meets_is_told_on_every_rank(pool: WorkerPool) -> None:
    told = pool.run(no_plan_fits, nprocs=2)
    assert told[0] == told[1]
    assert "smallest" in told[0] and "memory_limit" in told[0]


def test_a_search_that_ends_without_a_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit that nothing meets, where not even the smallest plan is found in the time there is."""
    monkeypatch.setattr("shardweave.planner.search.setting_search.smallest", lambda *_: None)
    options = sw.Options(memory_limit=4000)
    error = caught(sw.plan, MLP.model(), sw.Cluster.local(2), MLP.batch(0), options=options, progress=False)
    assert isinstance(error, sw.InfeasibleError)
    assert_told(error, "3.9 KiB", "30 s", "memory_limit", "time_limit")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory_limit": 0}, "memory_limit"),
        ({"optimizer": "adamax"}, "adamw"),
        ({"outputs": "local"}, "'part'"),
        ({"max_prefetch": -1}, "max_prefetch"),
        ({"time_limit": 0}, "time_limit"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], told: str) -> None:
    assert_told(caught(sw.Options, **options), told)


def other_models_on_ranks() -> str:
    """Each rank compiles another model: found before any collective of a step."""
    torch.manual_seed(0)
    sizes = (8, 8 + 4 * dist.get_rank())
    plan_error = caught(sw.compile_parallel, nn.Linear(*sizes), None, torch.zeros(4, 8))
    return type(plan_error).__name__ + ": " + str(plan_error)


def values_on_one_rank_alone() -> str:
    """Rank 0, which sends its values to the others, has none."""
    with torch.device("cpu" if dist.get_rank() == 1 else "meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    return str(caught(sw.compile_parallel, model, None, torch.zeros(4, 4), progress=False))


def test_values_on_one_rank_alone(pool: WorkerPool) -> None:
    first, second = pool.run(values_on_one_rank_alone, nprocs=2, timeout=60)
    assert first == second
    assert all(part in first for part in ("rank 1 has values", "rank 0 has none for 0.weight", "load_weights"))


def test_ranks_with_different_models(pool: WorkerPool) -> None:
    for text in pool.run(other_models_on_ranks, nprocs=2, timeout=60):
        assert "different" in text or "another model" in text, text


def test_a_defect_is_named_as_one_and_a_users_error_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong inside is one error of ours; what a user's function raises is the user's own."""
    model, cluster = nn.Linear(4, 4), sw.Cluster.local(2)

    def batch(size: int) -> Tensor:
        return {1: torch.ones(4, 4)}[-size]

    with pytest.raises(KeyError, match="-"):
        sw.plan(model, cluster, batch, sweep="batch")
    monkeypatch.setattr("shardweave.planner.search.search.fastest", lambda plannings: None)
    message = "Linear cannot be compiled, by a defect of shardweave: AttributeError"
    with pytest.raises(sw.InternalError, match=message) as caught:
        sw.plan(model, cluster, torch.ones(4, 4))
    assert isinstance(caught.value.__cause__, AttributeError) and "report" in str(caught.value)


@pytest.mark.parametrize("allow", [False, True])
def test_sparse_gradients_are_refused_with_the_way_out(allow: bool) -> None:
    """No advice that fails as well: a sparse gradient cannot be computed whole on every device either."""
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4))
    options = sw.Options(replicate_unknown_ops=allow)
    tokens = torch.zeros(4, 3, dtype=torch.long)
    error = caught(sw.plan, model, sw.Cluster.local(2), tokens, options=options, progress=False)
    assert_told(error, "sparse tensor", "sparse=False")
    assert "replicate_unknown_ops" not in str(error)


def compiles_under_an_older_torch() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.12.1+cpu")
        with pytest.raises(sw.ParallelError) as caught:
            sw.compile_parallel(nn.Linear(4, 4), sw.Cluster.local(2), torch.randn(4, 4), progress=False)
    return str(caught.value)


def test_several_ranks_under_an_older_torch_are_refused(pool: WorkerPool) -> None:
    told = pool.run(compiles_under_an_older_torch, nprocs=2)
    assert all("2 ranks need torch 2.13, and this is 2.12.1+cpu" in text for text in told)
