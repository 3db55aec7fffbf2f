"""Records of a run, the files that outlive it, tables and figures drawn from them."""
