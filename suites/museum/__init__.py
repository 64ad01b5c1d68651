"""Public bugs of attention and cache kernels, each made again as a small mutant that the ordinary campaign has to kill."""
