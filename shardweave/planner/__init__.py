"""The choice of strategies: `problem` prices a step, `solver` solves the integer program, `search` simulates what it
answers and keeps the best `Plan`. May import every room above this line of the architecture: `ir` to `report`.
"""

from shardweave.planner.problem.candidates import legal
from shardweave.planner.problem.force import forced_strategies
from shardweave.planner.search.evaluation import Decision, Judge, Judged, Known
from shardweave.planner.search.layer_problem import Steps
from shardweave.planner.search.micro_batch_search import fastest, powers
from shardweave.planner.search.op_choice import ModelKey
from shardweave.planner.search.plan import Plan
from shardweave.planner.search.planning import Planning

__all__ = [
    "Decision",
    "Judge",
    "Judged",
    "Known",
    "ModelKey",
    "Plan",
    "Planning",
    "Steps",
    "fastest",
    "forced_strategies",
    "legal",
    "powers",
]
