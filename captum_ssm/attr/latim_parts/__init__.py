"""What LaTIM is made of: contribution vectors, ALTI, and how both go through layers.

The files, in the order to read them: ``contributions`` (the vector that each token adds),
``alti`` (how much of a token's output is whose), ``chain`` (through layers), ``residual_stream``
(the layers of one stream) and ``grids`` (layers that work on different tokens).
"""
