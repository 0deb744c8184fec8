"""The few frozen types that every floor of shardweave speaks.

The one idea: a machine offers *axes*, an op has *factors* (its loops), and parallelising an op is assigning
each axis to one of its factors, or to none. Where a value lies is then derived:

- a factor that is in the output and has an axis: the output is sharded over that axis,
- a factor that is only in the inputs and has an axis: the output is a partial result over it,
- an axis on none of the factors: the output is replicated over it.

A dimension is a mixed-radix number whose digits, outermost first, are either an `Axis` (that digit differs from
device to device) or an ``int`` (that many steps lie on the device itself). ``(x, 32)`` is a plain shard of a
dimension of ``32 * x.size``; ``(3, x, 16)`` is the strided shard of a fused ``(3 h d)`` projection on its heads.
Axes have prime sizes, so a view never has to cut one.
"""

from shardweave.ir.layout import Layout, Padding, normalise
from shardweave.ir.mesh import Axis, Digit, Mesh, axes_size, group_name, prime_factors, slice_axis
from shardweave.ir.op_rule import Assignment, BoundRule, Dims, Factor
from shardweave.ir.overlap_config import ALL, BITS, MODES, Mode, Quantized, Weaving
from shardweave.ir.step_signature import META, SEED, Collective, NodeInfo, ParameterSpec, StepSpec, Traffic, ValueSpec
from shardweave.ir.strategy import Grid, GridAxes, Strategy

__all__ = [
    "ALL",
    "Assignment",
    "Axis",
    "BITS",
    "BoundRule",
    "Collective",
    "Digit",
    "Dims",
    "Factor",
    "Grid",
    "GridAxes",
    "Layout",
    "META",
    "MODES",
    "Mesh",
    "Mode",
    "NodeInfo",
    "Padding",
    "ParameterSpec",
    "Quantized",
    "SEED",
    "StepSpec",
    "Strategy",
    "Traffic",
    "ValueSpec",
    "Weaving",
    "axes_size",
    "group_name",
    "normalise",
    "prime_factors",
    "slice_axis",
]
