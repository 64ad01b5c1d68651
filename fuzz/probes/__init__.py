"""Designs of input values, each of which makes some classes of faults visible: the same bits on every machine."""

from fuzz.probes.catalogue import DESIGNS, RECOMMENDED, design, exact_weights, unfit
from fuzz.probes.model import Design, Fault, Inputs
from fuzz.probes.plain import PLAIN, values
from fuzz.probes.stream import Stream

__all__ = [
    "DESIGNS",
    "PLAIN",
    "RECOMMENDED",
    "Design",
    "Fault",
    "Inputs",
    "Stream",
    "design",
    "exact_weights",
    "unfit",
    "values",
]
