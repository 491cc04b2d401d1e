"""The page of an explanation: one HTML file, or a widget in a notebook. Needs no PyTorch."""

from captum_ssm.explanation.page.html import page_html
from captum_ssm.explanation.page.notebook import notebook_bundle, widget
from captum_ssm.explanation.page.states import states_page

__all__ = ["notebook_bundle", "page_html", "states_page", "widget"]
