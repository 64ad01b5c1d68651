"""Designs that say little: normal numbers, and normal numbers with one thing changed."""

from __future__ import annotations

import torch

from fuzz.probes.assemble import assemble, v_shape
from fuzz.probes.geometry import Geometry
from fuzz.probes.model import Inputs


def normal_values(geometry: Geometry) -> Inputs:
    """Normal numbers everywhere; unused slots hold the harness's poison, which is louder than any number here."""
    return assemble(geometry)


def constant_v(geometry: Geometry) -> Inputs:
    """Normal q and k, V = 1: the output shows the normalisation alone."""
    return assemble(geometry, v=torch.ones(v_shape(geometry.case), dtype=torch.float64))
