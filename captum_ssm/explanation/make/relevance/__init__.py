"""Rows of relevance: a method's answer to one question, for one input or a batch.

:mod:`run` is how the model is run, on one input or on several as a batch. :mod:`rows` computes the
relevance of questions by a method of :mod:`captum_ssm.attr`, and :mod:`captum_methods` by one of
Captum's own; :mod:`methods` reads the names of methods. :mod:`removal` then takes away the
tokens that a method ranks first, puts others in their place, and looks whether the answer falls.
:mod:`batches` says which inputs are computed together.
"""
