"""A benchmark of explanations for recurrent models, on examples whose cause is known.

    python -m benchmarks.truth --quick

Read in this order:

- :mod:`task`: what an example is, and the proof by intervention that its cause is the cause;
- :mod:`texts` and :mod:`floats`: the tasks, each with its model (:mod:`models`);
- :mod:`methods`: the entrants, each of which is one function ``(model, inputs, target)``;
- :mod:`measures`: what a map of relevance is scored by, and :mod:`circuits` what edges are;
- :mod:`harness`: the loop over tasks and methods, and :mod:`summary`: intervals and ranks;
- :mod:`page`: the page of a record.
"""
