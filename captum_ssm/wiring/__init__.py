"""What lies between the mixers: how each step's tokens are made of earlier ones.

A run of a model is cut at its mixers::

    input --+--> mixer 0 --+--> mixer 1 --+--> score
            |              |              |
            +------(around)+------(around)+      residual streams, skips, heads

What a mixer returns begins a new graph, so each piece of graph lies between mixers, and is made of
functions that handle every token by itself (norms, MLPs, projections), move tokens (flips, windows,
orders), or join them (patches, pools). One question is asked of each piece: *which earlier tokens
is each later token made of, and in which shares?* The answers are a :class:`~.wiring.TokenMap`: the
token in the same position, one other token, or token weights. Together they are the
:class:`~.wiring.Wiring`, along which a method carries relevance back.

- A *step* is one mixer, or several that run side by side.
- A *cut* is where the graph was taken apart: a mixer's input and output, or the model's input.
- *Around* means by a way that does not pass a mixer. One analysis of the graph finds what joins on
  the way from a mixer to what reads it (:class:`~captum_ssm.graph.segments.Around`). What that is
  made of tells what it is: a residual stream, a skip from other tokens, or an earlier state again.
- A *leak* is what moves between tokens with no mixer in between. It has to be nothing, or known.

The files, in the order to read them: ``cuts`` (a run, cut), ``mixer_graph`` (its pieces),
``token_order``, ``token_map`` (the one decision), ``residual_streams``, ``joined_streams``,
``skips`` and ``rejoined`` (around mixers), ``output`` and ``ledger`` (what the score reads),
``mixing_test`` (leaks), ``inputs`` (from tokens to the entries of an input), ``grids``, ``wiring``
(the result), and ``measure``, which does all of it in order.
"""
