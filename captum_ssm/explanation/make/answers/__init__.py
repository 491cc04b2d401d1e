"""A whole answer, in place of one token: spans and hops.

:mod:`continuation` is a prompt and the words after it, one row for each of them or for a span.
:mod:`trace` passes the relevance that lands on the answer's own words on to what made the model
write them, hop by hop. :mod:`whole` finds the thoughts and the answer in what the model wrote.
:mod:`captum_llm` stands in for Captum's wrapper of language models.
"""
