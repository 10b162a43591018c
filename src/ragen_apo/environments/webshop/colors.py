"""WebShop's colour words and what the option reward does with them.

`normalize_color` consumes an option value and gives the first colour word, in the list's order,
that occurs anywhere in it ("tan" in "titanium"). A value without a colour word stays as it is.
Source: upstream's list (MIT licence). Its order decides between several words.
"""

from typing import Final

_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold
granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon
leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust
sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger
turquoise violet walnut wheat white wine yellow
"""
COLOR_WORDS: Final = tuple(_WORDS.split())


def normalize_color(value: str) -> str:
    """The colour word that stands for an option value, or the value itself."""
    return next((color for color in COLOR_WORDS if color in value), value)
