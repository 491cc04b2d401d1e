"""A mixer that no adapter is registered for, measured.

The module runs once more on its recorded arguments, under a graph, with its scans and depthwise
convolutions cut off. What is left acts on each token by itself. So the gradient at a scan's output
from the input of the output projection, with the denominators of norms constant, is the product of
gate and norm, entry by entry, and says which token of the module each token of the scan is. The
gradient at a convolution's output from the scan's values is the activation's factor. Nothing about
the module's attributes is assumed.
"""

from captum_ssm.discovery.measure.mixer import freeze_measured as freeze_measured
from captum_ssm.discovery.measure.recurrence import FrozenRecurrence as FrozenRecurrence
