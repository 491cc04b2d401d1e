"""A data set explained: from rows to the shards of :mod:`captum_ssm.explanation.corpus`.

:mod:`sources` makes numbered rows of what people have: a data set of ``datasets``, a table, a file,
a list, or anything that can be iterated over. :mod:`rows` finds in a row what the model reads and
what is asked of it, and keeps the data set's own columns; :mod:`served` does both for the log of a
served model. :mod:`identity` hashes model, tokenizer and data, so that a run goes on with the same
ones only. :mod:`run` explains shard by shard, into a :mod:`folder` that several processes share; a
:mod:`budget` of memory says how many rows go together. :mod:`batches` is the same for Ray Data.

The unit of work is a shard: a fixed number of consecutive rows. What is in it depends on nothing
else, neither on the number of processes nor on where an earlier run ended.
"""

from captum_ssm.explanation.make.dataset.batches import ExplainBatches
from captum_ssm.explanation.make.dataset.run import explain_dataset
from captum_ssm.explanation.make.dataset.served import ServedLog

__all__ = ["ExplainBatches", "ServedLog", "explain_dataset"]
