"""Explained data sets on disk: many examples, as files that other programs read as well.

A folder holds a ``manifest.json`` (:mod:`manifest`: what was asked for, of which model and which
data) and *shards*: each is a fixed number of consecutive rows of the data set, one Parquet file
(:mod:`shards`: an example as a row, and back) with its maps, if any, in safetensors' format next to
it. A file is put into the folder as a whole or not at all, and a shard's Parquet file is written
last: where it lies, the shard is finished. :mod:`opened` reads a folder, shard by shard.

:mod:`summarize` reads such a folder, or an explanation of many texts, into a report: each example
becomes a few numbers (:mod:`readings`), these become mean shares with intervals (:mod:`shares`), of
all examples and of parts of them (:mod:`slices`), by where they look (:mod:`profiles`), and against
another run (:mod:`changes`); :mod:`report` is the result, and prints it;
:mod:`page_data` makes the data of its page.

Nothing here needs PyTorch; :mod:`captum_ssm.explanation.make.dataset` writes these folders.
"""

from captum_ssm.explanation.corpus.opened import ExplainedDataset, RowError, open_dataset

__all__ = ["ExplainedDataset", "RowError", "open_dataset"]
