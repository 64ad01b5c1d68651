"""The performance figures, each a ratio within one run, on fixed inputs."""

from fuzz.bench.report import NAMES, BenchReport, Figure, UnknownFigure
from fuzz.bench.run import bench

__all__ = ["NAMES", "BenchReport", "Figure", "UnknownFigure", "bench"]
