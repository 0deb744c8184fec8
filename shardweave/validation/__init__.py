"""Validation: published tables, built as forced plans of the compiler, simulated, and held against what was measured.

Data flow one way: `rows` reads the files of a folder, each paper's module (`amsp`, ...) makes `Row`s of it, by
plans on the cluster that `clusters` describes, and `report` shows them. `docs/validation.md` says what they say.
"""

from shardweave.validation.clusters import Constant, Described
from shardweave.validation.papers import validate
from shardweave.validation.rows import Result, Row, load, save_figures, validated
from shardweave.validation.setting import Setting

__all__ = ["Constant", "Described", "Result", "Row", "Setting", "load", "save_figures", "validate", "validated"]
