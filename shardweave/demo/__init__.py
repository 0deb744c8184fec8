"""The main job: a small GPT trains on local ranks with a planned, generated step. It uses public names only."""

from shardweave.demo.model import GPT, GPTConfig
from shardweave.demo.run import Recipe, run_demo

__all__ = ["GPT", "GPTConfig", "Recipe", "run_demo"]
