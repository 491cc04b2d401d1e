"""What people pass to :func:`explain`, as the model reads it.

:mod:`parse_inputs` tells texts, conversations, ids and arrays apart, and takes a pipeline of
transformers apart into model and tokenizer. :mod:`reading` is a text as tokens, each with its span
in the text, and :mod:`media` what goes with it; :mod:`patches` says which tokens an image is.
:mod:`templates` finds the turns and the special tokens of a chat template. :mod:`arrays` finds out
what an array is (an image, a video, a series, a row of a table), and :mod:`pictures` opens images.
"""
