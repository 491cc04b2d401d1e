"""What is asked about an input: which outputs, which answers there, and what an example shows.

:mod:`kinds` tells what a model of texts puts out, and a table in :mod:`asked` leads from there to
the question about each text: the next token (:mod:`texts`), a class or labels of tokens
(:mod:`classes`, by the names of :mod:`labels`), or the part that answers a question
(:mod:`spans`). Images and series have a question of their own (:mod:`arrays`).
Each collects ``Questions`` (:mod:`base`): the answers at each output, and the rows of relevance
that explain them. :mod:`observed` keeps one run of the model for what is read before any question,
:mod:`lens` says what each layer would answer, :mod:`circuits` adds the circuit, and
:mod:`explained` puts the example together.
"""
