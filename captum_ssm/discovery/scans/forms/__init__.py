"""Forms of scans: how the arguments of a kind of function play the parts of an operator."""
