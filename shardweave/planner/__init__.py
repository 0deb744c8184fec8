"""The choice of strategies: `problem` prices a step, `solver` solves the integer program, `search` simulates what it
answers and keeps the best `Plan`. May import every room above this line of the architecture: `ir` to `report`.
"""

from shardweave.planner.problem.space import Space, forced_strategies, legal
from shardweave.planner.search.evaluation import (
    MAX_CACHED_SHARDED_GRAPHS,
    Decision,
    Evaluation,
    Known,
    PlanEvaluator,
    Sharded,
    StepLowering,
)
from shardweave.planner.search.layer_problem import Steps
from shardweave.planner.search.plan import ModelKey, Plan
from shardweave.planner.search.search import MAX_CACHED_SIMULATIONS, PlanSearch

__all__ = [
    "MAX_CACHED_SHARDED_GRAPHS",
    "MAX_CACHED_SIMULATIONS",
    "Decision",
    "Evaluation",
    "Known",
    "ModelKey",
    "Plan",
    "PlanEvaluator",
    "PlanSearch",
    "Sharded",
    "Space",
    "StepLowering",
    "Steps",
    "forced_strategies",
    "legal",
]
