"""Questions about a model: its maps, what of it is supported, what a call costs, how far it sees."""
