"""The search-space file: read, checked at file:line:column, and turned into configurations."""

from tuner.space.domains import Assignment, Choices, Condition, Domain, FloatRange, IntRange
from tuner.space.load import load_space, parse_space
from tuner.space.model import Constraint, Objective, Pick, SpaceFile, Study
from tuner.space.space import Infeasible, Refusals, Space

__all__ = [
    "Assignment",
    "Choices",
    "Condition",
    "Constraint",
    "Domain",
    "FloatRange",
    "Infeasible",
    "IntRange",
    "Objective",
    "Pick",
    "Refusals",
    "Space",
    "SpaceFile",
    "Study",
    "load_space",
    "parse_space",
]
