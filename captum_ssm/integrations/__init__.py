"""Other libraries' front doors: each module needs the library of its name, and is imported by hand.

:mod:`captum_ssm.integrations.inseq` gives inseq the methods by name;
:mod:`captum_ssm.integrations.transformer_lens` gives TransformerLens exact maps.
"""
