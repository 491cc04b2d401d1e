"""Questions about a model: its maps, what of it is supported, a call's cost, how far it sees."""
