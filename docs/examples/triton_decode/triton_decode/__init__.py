"""A paged decode kernel in Triton."""
