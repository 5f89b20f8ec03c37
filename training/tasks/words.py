"""Word lists that several tasks draw from. Names of people and cities here are common ones, nobody's data."""

from __future__ import annotations

NAMES = tuple(
    """
    Anna Ben Carla David Emma Felix Grace Henry Ines Jack Kate Leo Maria Noah Olga Paul Rosa Sam Tina Victor
    Alice Bob Clara Daniel Eva Frank Hanna Ivan Julia Karl Laura Mark Nina Oscar Peter Rita Simon Tom Vera \
Will
    Amir Bianca Chen Diego Elif Fatima George Hugo Ida Jonas Kim Lena Mia Nora Omar Pia Raj Sara Tariq Yuki
    Adam Bella Chloe Dylan Ella Finn Greta Ian Jane Kevin Lucy Max Nadia Otto Priya Ruth Sven Tess Uma Zoe
    """.split()  # noqa: SIM905
)

CITIES = tuple(
    """
    Paris London Berlin Madrid Rome Vienna Lisbon Dublin Oslo Prague Tokyo Cairo Lima Delhi Boston Chicago
    Seattle Denver Toronto Sydney Munich Hamburg Milan Naples Lyon Porto Geneva Zurich Athens Warsaw Krakow
    Helsinki Stockholm Seoul Beijing Nairobi Lagos Austin Dallas Miami Bristol Leeds Oxford Turin Ghent
    """.split()  # noqa: SIM905
)

# Short, common words: the string tasks ask for their letters, so the model has to learn how each is spelled.
WORDS = tuple(
    """
    apple bread chair cloud dance earth field glass green horse house juice knife lemon light money month \
mouse
    music night ocean paper peach phone piano plant queen radio river salad sheep shirt snake space spoon \
stone
    storm sugar table tiger tower train truck uncle water whale world zebra beach brick camel candy clock \
coast
    crown dream eagle flame fruit ghost grape heart hotel island jacket kitten ladder market mirror monkey \
needle
    orange pencil planet pocket rabbit school silver spider spring street summer sunset turtle valley violin
    window winter yellow anchor basket bottle bridge butter button candle carpet castle cheese cherry circle \
coffee
    cotton desert dinner doctor dragon engine family farmer finger flower forest garden guitar hammer helmet \
honey
    jungle lizard magnet melon motor onion oven panda pepper pirate pizza potato puzzle rocket sailor sister
    socket stable ticket tomato tunnel velvet wagon wallet walnut wizard cat dog sun moon star tree fish \
bird book
    door road rain snow wind fire lake hill ship boat milk cake salt rice soup frog duck goat lion bear wolf \
deer
    hand foot nose ring bell drum lamp desk wall roof seed leaf rose sand gold iron rope coin king town farm \
map
    cup hat key bag box bed egg ice jam leg net owl pan pen pig sea sky toy van web zoo ant bee cow fox hen
    """.split()  # noqa: SIM905
)

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "pink", "grey")
FOODS = (
    "pizza",
    "soup",
    "salad",
    "bread",
    "cake",
    "coffee",
    "tea",
    "juice",
    "pasta",
    "rice",
    "cheese",
    "burger",
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
