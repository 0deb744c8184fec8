"""The choice of strategies: `problem` prices a step, `solver` solves the integer program, `search` simulates what it
answers and keeps the best `Plan`. May import every room above this line of the architecture: `ir` to `report`.
"""

from shardweave.planner.problem.candidates import legal
from shardweave.planner.problem.force import forced_strategies
from shardweave.planner.search.evaluation import Judge, Judged, Known
from shardweave.planner.search.layer_problem import Steps
from shardweave.planner.search.lowering import KEPT_DECISIONS, Decision, Sharded, StepLowering
from shardweave.planner.search.micro_batch_search import fastest, powers
from shardweave.planner.search.op_choice import ModelKey
from shardweave.planner.search.plan import Plan
from shardweave.planner.search.planning import Planning
from shardweave.planner.search.search import KEPT_FIGURES, PlanSearch

__all__ = [
    "Decision",
    "Judge",
    "Judged",
    "KEPT_DECISIONS",
    "KEPT_FIGURES",
    "Known",
    "ModelKey",
    "Plan",
    "PlanSearch",
    "Planning",
    "Sharded",
    "StepLowering",
    "Steps",
    "fastest",
    "forced_strategies",
    "legal",
    "powers",
]
