"""Failure texts of public bugs: an example kernel, each bug recreated in it, and what a reader is shown."""
