"""How an unknown module becomes a frozen mixer, from the calls of scans inside of it.

*The idea.* Nothing is known of a module but that it runs. While it runs, each call that may be a
scan is looked at: the library makes an operator of the call's arguments and computes the result
again. If both agree, the call is a scan, whatever its name is and whoever wrote it. A guess costs
time and cannot lie. Around its scans a mixer treats each token by itself, which is why the rest can
be measured with a few gradients. The finished mixer is compared with the module's output, too.

::

    a run of the model                        search: which modules hold scans
      |  a call f(u, delta, A, B, C)          scans/calls: intercepted where f is defined
      v
    form -> candidates: operator, values,     scans/forms: what f may compute of
      |     skip, gates, layouts              arguments with such names
      v
    proof: operator(values) == result?        scans/proof: no -> the next candidate, then
      |  yes                                  scans/impulses
      v
    Scan: operator, values, gate              taken: noted, cut off, or exchanged
      |
      v
    module run again, its scans cut off       measure/cut_run: each result becomes a leaf
      |  projection, directions,              measure: steps that each read what tokens
      |  convolution, skips, branches         and channels go where off gradients
      v
    FrozenMixer, compared with the module     measure/mixer

*The terms.* A **role** is what an argument is to a scan (x, dt, A, B, C; q, k, v), whatever the
function calls it. A **form** is a function of roles that yields **candidates**: operators that a
call may have computed. A call with a proven candidate is a **scan**. Where no form fits but
queries, keys and values are there, the maps are measured with **impulses**, one per token. A
**cut** run replaces what scans and convolutions returned by leaves of the graph. A **direction** is
the part of a scan that runs over the module's tokens in one order.

*What is looked at*: Python functions whose parameters have the names of a form, PyTorch's softmax
attention, convolutions by Fourier transforms, products of tokens with a matrix (``softmax(q k)
v``), loops over tokens whose results are gathered, and associative scans.

*The order of the files.* ``scans`` knows calls: ``form`` says what a form and a candidate are, and
registers them; ``calls`` intercepts, ``proof`` decides, with ``impulses`` and ``packed`` (several
sequences in one row); ``reuse`` keeps what a slow scan returned. A loop that no form explains is
read off a ``trace`` of the calls it made: ``steps`` runs its steps again with changes, and
``recurrences`` tells what they add up. In ``scans/forms``, ``arguments``
and ``heads`` are for those who write forms; ``ssm``, ``linear_attention``, ``softmax``, ``fla`` and
``fourier`` are the forms; ``products``, ``loops``, ``sums`` and ``states`` make calls of what is
not a function. ``measure`` knows one module: ``cut_run`` runs it, ``projection``, ``directions``,
``moved``, ``convolution``, ``token_shift`` and ``added_terms`` are what is measured, and ``mixer``
puts it together, with scans of channels of their own ``side_by_side``. ``search`` knows a model,
and says which of its modules are mixers; ``visited`` are their calls, ``trials`` tells which of
the calls around a scan is the mixer's, and ``other_calls`` notes what else is seen on the way.
``frozen_scans`` holds the coefficients of scans constant while a model runs.

A form of your own takes ten lines: ``docs/development/add_a_scan_form.md``.
"""
