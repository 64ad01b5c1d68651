"""What a person or a script reads at the end of a run."""
