"""An autograd graph: what depends on what, how strongly, and by which rules relevance passes it.

PyTorch records every operation of a run as a node, whichever module computed it. This folder reads
that graph and knows nothing of mixers.

- A *point* is a tensor of tokens that a run left in its graph. Gradients put in at a later point
  and read at an earlier one say how the later point's tokens depend on the earlier one's. A token
  that is not read has a gradient of exactly zero, in half precision too.
- A *kind* is the name of a node's operation. It decides the *rule* by which relevance passes the
  node: a norm counts as a constant factor, a product gives half to each side.
- *Token weights* are rows of shares: how strongly each token reads each earlier one.
- A *side* is a tensor that joins on the way from some points to a later one, and does not come of
  them: it goes around them.

The files, in the order to read them: ``points`` (points, their gradients, the graph between them),
``kinds``, ``in_place`` (operations on views, whose nodes autograd hides), ``node_rules`` and
``relevance_rules``, ``token_weights``, ``factors``. In addition, ``reachability`` and ``readers``
tell what depends on what by no or few backward passes, which ``fast_products`` makes cheap, and
``segments`` tells what goes around some points.
"""
