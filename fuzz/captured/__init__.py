"""Calls captured in production (``oracle.record``): read, judged, diagnosed, made smaller."""
