"""The vocabulary of the generated catalogue: kinds of products, brands, features, options.

Words are shared between kinds on purpose ("non slip", "easy clean", "mat", "case"), so that a
search finds products of other kinds too. Changing anything here changes the data: raise
GENERATOR_VERSION.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Kind:
    """One kind of product."""

    query: str
    category: str
    path: tuple[str, ...]
    nouns: tuple[str, ...]
    materials: tuple[str, ...]
    features: tuple[str, ...]
    price_range: tuple[float, float]
    sizes: str = ""
    """The name of a list in SIZES; empty: the kind has no sizes."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _lists(text: str) -> dict[str, tuple[str, ...]]:
    """A list by its name, one a line; a line that goes on is indented."""
    named = (line.partition(":") for line in text.strip().replace("\n    ", " ").splitlines())
    return {name: _words(words) for name, _, words in named}


SIZES: Final[dict[str, tuple[str, ...]]] = _lists("""
clothes: x-small, small, medium, large, x-large, xx-large, 3x-large, 4x-large
shoes: 5.5, 6, 6.5, 7, 7.5, 8, 8.5, 9, 9.5, 10, 10.5, 11, 12
rugs: 2 ft x 3 ft, 3 ft x 5 ft, 4 ft x 6 ft, 5 ft x 8 ft, 6 ft x 9 ft, 8 ft x 10 ft
beds: twin, twin xl, full, queen, king, california king
packs: 8 ounce (pack of 1), 8 ounce (pack of 2), 12 ounce (pack of 1), 1 pound, 2 pound
bottles: 30ml, 50ml, 100ml, 1.7 fl oz, 3.4 fl oz, 6.8 fl oz
cables: 3 feet, 6 feet, 10 feet, 15 feet, 25 feet, 50 feet
screens: 32 inch, 40 inch, 43 inch, 50 inch, 55 inch, 65 inch
""")

BRANDS: Final = _words("""
    Alvora, Bramwell, Cindral, Dovetree, Elmora, Fennwick, Gralto, Hallowmere, Ibbery,
    Juniper Row, Kestrel Bay, Lumora, Mistral, Norvane, Oakhurst, Pellano, Quillon, Rosemead,
    Santara, Tallis, Umbra Lane, Vesper, Wrenfield, Xandro, Yarrow, Zelmira, Harbor Home,
    True North, Soft Hours, Copperline, Bluefinch, Nine Pines
""")
ADJECTIVES: Final = _words("""
    classic, modern, portable, premium, vintage, soft, lightweight, durable, elegant, casual,
    compact, professional, cozy, slim, stylish, large, mini, adjustable, foldable, natural
""")
AUDIENCES: Final = _words("""
    women, men, girls, boys, home office, living room, bedroom, outdoor travel, daily use,
    gift giving, sensitive skin, beginners
""")
COLORS: Final = _words("""
    black, white, navy, red, wine red, light blue, dark grey, khaki, olive green, pink,
    rose gold, purple, beige, coffee, yellow, orange, silver, teal, ivory, charcoal, b1-black,
    b2-blue, multi
""")
PATTERNS: Final = _words("stripe, floral, plaid, dots, camo, marble, leopard, solid")
CLOSINGS: Final = _words("""
    a good choice for every day, easy to keep and easy to love, designed to last for years,
    please check the size chart before you order, a thoughtful gift for family and friends,
    contact us with any question, made with care in small batches,
    fits most rooms and most styles
""")

_FEATURES: Final = _lists("""
clothes: machine wash, hand wash, slim fit, loose fit, long sleeve, short sleeve, elastic waist,
    high waist, classic fit, quality polyester, daily wear, tumble dry, button closure
shoes: non slip, rubber sole, memory foam, arch support, lace closure, day comfort,
    slip resistant, ankle strap, daily wear, breathable
home: easy clean, non slip, machine washable, living room, dining room, spot clean, easy assemble,
    home furnishings, space saving, eco friendly, storage space, heavy duty
beauty: cruelty free, paraben free, long lasting, sensitive skin, dry skin, natural ingredients,
    easy use, high quality, dead skin, hyaluronic acid, tea tree, travel size
food: gluten free, non gmo, sugar free, low carb, plant based, dairy free, soy free,
    keto friendly, individually wrapped, certified organic, high protein, artificial flavors
tech: high speed, plug play, wireless charging, long lasting, easy install, fast charging,
    gold plated, water resistant, noise cancelling, high definition, carrying case, hands free
""")
_MATERIALS: Final = _lists("""
cloth: cotton, polyester, linen, wool blend, denim, fleece
sole: leather, suede, mesh, canvas, faux leather
table: wood, metal, glass, bamboo, engineered wood
fabric: microfiber, cotton, velvet, flannel, jute
fluids: gel, cream, oil, foam, balm
tastes: almond, cocoa, vanilla, berry, sea salt, lemon, coconut, cinnamon
casings: aluminum, nylon, silicone, carbon fiber, plastic
""")

_TABLE: Final = """
men's dress shirts | fashion | Clothing, Shoes & Jewelry > Men > Shirts > Dress Shirts
    | dress shirt, button down shirt, business shirt | cloth | clothes | 8 | 70 | clothes
men's t-shirts & tanks | fashion | Clothing, Shoes & Jewelry > Men > Shirts > T-Shirts
    | t-shirt, tee, tank top, crewneck shirt | cloth | clothes | 5 | 40 | clothes
men's jeans | fashion | Clothing, Shoes & Jewelry > Men > Jeans
    | jeans, straight leg jean, pants | cloth | clothes | 15 | 90 | clothes
women's sweaters | fashion | Clothing, Shoes & Jewelry > Women > Sweaters
    | sweater, pullover, knit top, cardigan | cloth | clothes | 10 | 80 | clothes
women's dresses | fashion | Clothing, Shoes & Jewelry > Women > Dresses
    | dress, maxi dress, sundress | cloth | clothes | 10 | 120 | clothes
women's pants | fashion | Clothing, Shoes & Jewelry > Women > Pants
    | pants, trousers, leggings | cloth | clothes | 8 | 60 | clothes
men's loafers & slip-ons | fashion | Clothing, Shoes & Jewelry > Men > Shoes > Loafers
    | loafer, slip-on shoe, casual shoe | sole | shoes | 20 | 150 | shoes
women's sandals | fashion | Clothing, Shoes & Jewelry > Women > Shoes > Sandals
    | sandal, platform sandal, slide | sole | shoes | 12 | 90 | shoes
area rugs | garden | Home & Kitchen > Home Decor > Rugs
    | area rug, runner rug, floor mat, carpet | fabric | home | 15 | 300 | rugs
throw blankets | garden | Home & Kitchen > Bedding > Blankets & Throws
    | throw blanket, fleece blanket, bed throw | fabric | home | 12 | 80 | beds
bedding sets | garden | Home & Kitchen > Bedding > Sheets & Pillowcases
    | sheet set, duvet cover set, bedding set | fabric | home | 20 | 150 | beds
desks | garden | Home & Kitchen > Furniture > Home Office Furniture > Desks
    | computer desk, writing desk, standing desk | table | home | 60 | 600 |
dining tables | garden | Home & Kitchen > Furniture > Dining Room Furniture > Tables
    | dining table, kitchen table, console table | table | home | 80 | 900 |
office chairs | garden | Home & Kitchen > Furniture > Home Office Furniture > Chairs
    | office chair, desk chair, task chair | table | home | 50 | 400 |
floor lamps | garden | Home & Kitchen > Lighting > Lamps
    | floor lamp, reading lamp, led lamp | table | home | 20 | 180 |
face moisturizers | beauty | Beauty & Personal Care > Skin Care > Face > Moisturizers
    | face cream, moisturizer, day cream | fluids | beauty | 6 | 80 | bottles
scrubs & body treatments | beauty | Beauty & Personal Care > Skin Care > Body > Scrubs
    | body scrub, body treatment, exfoliator | fluids | beauty | 6 | 50 | bottles
shampoo & conditioner | beauty | Beauty & Personal Care > Hair Care > Shampoo
    | shampoo, conditioner, hair treatment | fluids | beauty | 5 | 45 | bottles
makeup brushes | beauty | Beauty & Personal Care > Tools > Brushes
    | makeup brush set, brush kit, cosmetic brush | casings | beauty | 5 | 60 |
snack bars | grocery | Grocery & Gourmet Food > Snacks & Sweets > Bars
    | snack bar, protein bar, granola bar | tastes | food | 4 | 45 | packs
cookies | grocery | Grocery & Gourmet Food > Snacks & Sweets > Cookies
    | cookies, biscuits, shortbread | tastes | food | 3 | 35 | packs
tea | grocery | Grocery & Gourmet Food > Beverages > Tea
    | herbal tea, green tea, tea bags | tastes | food | 4 | 40 | packs
cables | electronics | Electronics > Accessories & Supplies > Cables
    | charging cable, hdmi cable, usb cable, extension cord | casings | tech | 4 | 60 | cables
headphones | electronics | Electronics > Headphones & Audio > Headphones
    | headphones, earbuds, wireless headset | casings | tech | 10 | 350 |
phone cases | electronics | Electronics > Accessories & Supplies > Cases
    | phone case, protective case, wallet case | casings | tech | 4 | 50 |
televisions | electronics | Electronics > Television & Video > Televisions
    | smart tv, led tv, television | casings | tech | 120 | 990 | screens
"""
"""Two lines a kind: query, category, path | nouns, materials, features, price range, sizes."""


def _kind(row: str) -> Kind:
    query, category, path, nouns, materials, features, low, high, *sizes = _cells(row)
    return Kind(
        query=query,
        category=category,
        path=tuple(level.strip() for level in path.split(">")),
        nouns=_words(nouns),
        materials=_MATERIALS[materials],
        features=_FEATURES[features],
        price_range=(float(low), float(high)),
        sizes=sizes[0] if sizes else "",
    )


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.rstrip(" |").split("|")]


KINDS: Final = tuple(_kind(row) for row in _TABLE.strip().replace("\n    |", " |").splitlines())
