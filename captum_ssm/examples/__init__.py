"""Small trained models that come with the package, each with an input it was made for.

They are explained in the documentation and the tutorials, where the right explanation is known:
which word decides the answer, which pixels are the digit, which step of a series was copied. They
take less than a second to load and need no network::

    import captum_ssm.examples

    model, tokenizer = captum_ssm.examples.load("stories-mamba")
    captum_ssm.explain(model, tokenizer, captum_ssm.examples.sample("stories-mamba"))

:mod:`loading` has the functions. :mod:`series` has the models of series, written as people write
them; nothing in them is made for being explained.

Where the answers come from is public too. :mod:`stories`, :mod:`copying`, :mod:`chains`,
:mod:`documents`, :mod:`digits`, :mod:`scenes` and :mod:`signals` draw inputs together with the
words, letters, pixels or steps that decide each answer, so that any method can be checked against
what is known. :mod:`split` says which texts are held out. :mod:`typeseg` is a published model in
plain PyTorch, with the weights of the package of that name.

``data/`` has a folder per model, which ``transformers`` and the command line load like any
checkpoint. The weights are stored in float16 and computed with in float32.
"""

from captum_ssm.examples.loading import folder, load, names, sample

__all__ = ["folder", "load", "names", "sample"]
