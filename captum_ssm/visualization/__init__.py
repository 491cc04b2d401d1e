"""Figures and HTML for relevance of tokens, images, series, videos, volumes and circuits.

Functions take tensors and return a matplotlib figure or HTML; they show nothing by themselves.
Figures are made without pyplot, which would keep them open and may need a display.

Color means relevance and nothing else: orange for the target, blue against it, paper for zero. The
scale is symmetric around zero, and its numbers stand next to the color bar. ``scale=`` says at
which magnitude the color is strongest:

- ``"each"``: each panel (image, layer, row) has a scale of its own, by :func:`color_limit`;
- ``"shared"``: one scale for all panels of the figure, by :func:`color_limit` of all of them;
- a number: exactly there, which makes several figures comparable.
"""

from captum_ssm.visualization.flows import flow_graph
from captum_ssm.visualization.images import image_overlay
from captum_ssm.visualization.maps import interaction_map, layer_overview, map_strip
from captum_ssm.visualization.palette import color_limit, relevance_colors
from captum_ssm.visualization.receptive_fields import receptive_field_map
from captum_ssm.visualization.series import series_plot
from captum_ssm.visualization.states import state_plot
from captum_ssm.visualization.text import readable_tokens, text_html, text_record
from captum_ssm.visualization.volumes import video_strip, volume_slices

__all__ = [
    "color_limit",
    "flow_graph",
    "image_overlay",
    "interaction_map",
    "layer_overview",
    "map_strip",
    "readable_tokens",
    "receptive_field_map",
    "relevance_colors",
    "series_plot",
    "state_plot",
    "text_html",
    "text_record",
    "video_strip",
    "volume_slices",
]
