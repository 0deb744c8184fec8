"""The choice of strategies: `problem` prices a step, `solver` solves the integer program, `search` simulates what it
answers and keeps the best `Plan`. May import every room above this line of the architecture: `ir` to `report`.
"""

from shardweave.planner.problem.candidates import forced_strategies, legal
from shardweave.planner.search.evaluation import KEPT_DECISIONS, Decision, Judge, Judged, Known, Sharded, StepLowering
from shardweave.planner.search.layer_problem import Steps
from shardweave.planner.search.plan import ModelKey, Plan
from shardweave.planner.search.planning import Planning
from shardweave.planner.search.search import KEPT_FIGURES, PlanSearch, fastest, powers

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
