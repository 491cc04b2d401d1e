"""What the relevance flow is made of: edges between tokens, and the nodes that they join.

The network that MambaLRP propagates through is linear over tokens in each mixer, so that the
relevance of a mixer's output is a sum over the tokens that it reads: the *edges*. Between mixers,
each token keeps its position. Tokens at each depth of the residual stream are the *nodes* of a
graph, in which what arrives at a node is what leaves it.

The files, in the order to read them: ``edge`` (one edge), ``activations`` (a run that keeps what is
inside of the mixers), ``layer_edges`` (the edges of one mixer, an operator), ``edges`` (those of
all), ``stream`` (the nodes), ``ways`` (what reaches a node by no edge), ``graph`` (all of it, as it
is drawn; ``build`` puts it together), and ``paths``. In addition, ``direct`` and ``components``
say what each part of a model writes for the answer by itself, and ``features`` what the latents of
a sparse autoencoder do.
"""
