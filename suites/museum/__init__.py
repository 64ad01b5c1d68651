"""Public bugs of attention and cache kernels, each made again as a small mutant that a campaign has to kill."""
