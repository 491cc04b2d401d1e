"""The one palette of pictures, pages and the terminal."""

# Ramps from zero to the strongest value. Orange and blue stay apart in every common form of color
# blindness, and lightness tells the magnitude where no color is seen.
FOR = ("#ffffff", "#fde3c6", "#fabd7d", "#ea8630", "#b9540b")
AGAINST = ("#ffffff", "#d9e8f4", "#9ec8e6", "#5299cd", "#1f66a8")
PAPER, INK, SOFT, FAINT, LINE, SUNKEN = (
    *("#ffffff", "#1b1c1e", "#6a6b6f", "#b4b4b3", "#e3e2dd", "#f4f4f1"),
)
